"""HybridEPBuffer: dispatch with permute, and combine with unpermute, over a Buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.buffer import Buffer
from tokenyard.compat.hybrid_ep.refusal import heard_by_all
from tokenyard.compat.hybrid_ep.routing import (
    HybridHandle,
    HybridRoute,
    checked_map,
    checked_probs,
    indices_to_map,
    route_of,
)
from tokenyard.ops.permute import spread, unpermute
from tokenyard.results import Rows
from tokenyard.runtime.copies import Once
from tokenyard.types import ROW_DTYPES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)


@dataclass
class BufferConfig:
    """What a HybridEPBuffer was made for. Nothing is bound by it: larger inputs work too."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int  # grows with what is dispatched
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int


@dataclass
class Configurer:
    buffer_config: BufferConfig


class DispatchedWithPermute(NamedTuple):
    hidden: Tensor  # [M, D]
    probs: Tensor | None  # [M] float32, 0 in padding rows
    scaling_factor: Tensor | None  # [M, S]
    tokens_per_expert: Tensor  # [L] int64, padding included
    handle: HybridHandle


class HybridEPBuffer(Once):
    """Sends tokens to their experts' ranks, grouped by expert there, and sums results back.

    The parameters are HybridEP's. hidden_dim, max_num_of_tokens_per_rank and num_local_experts are
    kept in `configurer.buffer_config` and bind nothing. Those about SMs, blocks, cached kernels and
    NVLink are accepted and have no use here. The last ones, keyword only, are those of `Buffer`.

    Every rank of the group makes the same calls in the same order, and each may have another
    number of tokens. Bad input on one rank raises on all.
    """

    def __init__(
        self,
        group: ProcessGroup | Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
        *,
        transport: str = "auto",
        kernels: str = "auto",
        ranks_per_node: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        self._buffer = Buffer(
            group,
            transport=transport,
            kernels=kernels,
            ranks_per_node=ranks_per_node,
            timeout=timeout,
        )
        self._kernels = kernels
        self.rank, self.group_size = self._buffer.rank, self._buffer.group_size
        nodes = self._buffer._open_engine().topology.node_of_rank
        sizes = {nodes.count(node) for node in nodes}
        # Uneven nodes are told as one, since HybridEP has no words for them.
        per_node = sizes.pop() if len(sizes) == 1 else self.group_size
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = per_node
        self.num_of_nodes = self.group_size // per_node
        self.node_rank, self.local_rank = divmod(self.rank, per_node)
        self.configurer = Configurer(
            BufferConfig(
                hidden_dim,
                max_num_of_tokens_per_rank,
                num_local_experts,
                per_node,
                self.num_of_nodes,
            )
        )

    @property
    def group(self) -> ProcessGroup | Any:
        """The group it was made for; None once that was destroyed."""
        return self._buffer.group

    def destroy(self) -> None:
        """Give back what it holds; twice is fine. One that nobody holds any more frees itself."""
        self._buffer.close()

    def stats(self, reset: bool = False) -> dict[str, Any]:
        """What this rank has done, as `Buffer.stats` tells it."""
        return self._buffer.stats(reset)

    def empty_jit_cache(self) -> None:
        """HybridEP's; does nothing, since tokenyard's kernels do not depend on a Buffer."""

    @heard_by_all
    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | Tensor | None = None,
        pad_multiple: int | None = None,
        handle: Sequence[Any] | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> DispatchedWithPermute:
        """Send every token of hidden [T, D] to each of its experts: rows come by (expert, source
        rank, token).

        Routing is routing_map [T, E] bool with probs [T, E] float32, or topk_idx [T, K] with
        topk_weights and num_of_experts, or the handle of an earlier dispatch. Zeros pad each
        expert's rows to a multiple of pad_multiple. Scales go with quantised rows only, as in
        HybridEP. With a handle, new probs need no map.

        With num_permuted_tokens so many rows come back: zeros follow those that arrived. If more
        arrive, non_blocking=True drops them (handle.overflow_flag is 1), else this rank raises.
        """
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        try:
            rows, device = _rows(hidden, scaling_factor), hidden.device
            limit = _limit(num_permuted_tokens, pad_multiple, non_blocking)
            if handle is not None:
                route = route_of(handle)
                shape = num_tokens, num_experts = route.handle.num_tokens, route.num_experts
                if routing_map is None and topk_idx is not None:
                    _, probs = indices_to_map(topk_idx, topk_weights, num_tokens, num_experts)
                probs = checked_probs(probs, shape, device)
                validate.require(
                    limit is None or limit == route.num_rows,
                    f"num_permuted_tokens is {limit}, want the handle's {route.num_rows}",
                )
            else:
                routing_map, probs = checked_map(
                    hidden, topk_idx, topk_weights, num_of_experts, routing_map, probs
                )
                per_rank, num_experts = num_of_experts_per_rank, routing_map.shape[1]
                validate.require(
                    per_rank is None or per_rank * self.group_size == num_experts,
                    f"num_of_experts_per_rank is {per_rank}, want {num_experts} experts / "
                    f"{self.group_size} ranks",
                )
        except Exception as error:  # whatever is wrong with what one rank was given
            raise self._refused(error) from None
        if handle is not None:
            return self._dispatch_again(rows, probs, HybridHandle(*handle))
        assert routing_map is not None
        return self._dispatch(rows, routing_map, probs, pad_multiple or 1, limit, non_blocking)

    @heard_by_all
    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: Sequence[Any] | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """([T, D], [T, E] or None): each token's sum of the rows of hidden [M, D] that its experts
        made, and the probs [M] back in their places of the map, zeros elsewhere.

        Sums are those of Buffer.combine_by_expert with weigh=False. Padding is not read.
        """
        try:
            route = route_of(handle)
            rows = _rows(hidden, None, route.num_rows, validate.SUMMABLE)
            probs = checked_probs(probs, (route.num_rows,), hidden.device)
        except Exception as error:  # whatever is wrong with what one rank was given
            raise self._refused(error) from None
        by_expert = route.handle.by_expert
        assert by_expert is not None
        if probs is None and not route.may_drop:
            return self._buffer.combine_by_expert(
                rows[: by_expert.num_rows], route.handle, weigh=False
            ), None
        share = unpermute(rows, route.row_of, kernels=self._kernels)
        lanes_NK = None if probs is None else route.by_received_lane(probs)
        x, lanes_TK, _ = self._buffer.combine(share, route.handle, lanes_NK)
        return x, None if lanes_TK is None else route.by_map(lanes_TK)

    def _refused(self, error: Exception) -> Exception:
        """All ranks raise: this one the error, the others PeerInputError."""
        self._buffer.refuse(error)
        return AssertionError("a refusal raises")

    def _dispatch(
        self,
        rows: Rows,
        routing_map: Tensor,
        probs: Tensor | None,
        alignment: int,
        limit: int | None,
        drop: bool,
    ) -> DispatchedWithPermute:
        num_tokens, num_experts = routing_map.shape
        token_P, expert_P = routing_map.nonzero(as_tuple=True)
        count_T = routing_map.sum(1)
        first_T = count_T.cumsum(0) - count_T
        lane_P = torch.arange(len(token_P), device=token_P.device) - first_T[token_P]
        # All ranks need one K, and a map does not tell it.
        most = count_T.max().clamp(min=1)[None] if num_tokens else count_T.new_ones(1)
        num_topk = int(self._buffer.all_gather(most).x.max())
        topk_idx = expert_P.new_full((num_tokens, num_topk), -1)
        topk_idx[token_P, lane_P] = expert_P
        weights = topk_idx.new_zeros(num_tokens, num_topk, dtype=torch.float32)
        if probs is not None:
            weights[token_P, lane_P] = probs[token_P, expert_P]
        got = self._buffer.dispatch_by_expert(
            rows, topk_idx, weights, num_experts=num_experts, expert_alignment=alignment
        )
        by_expert = got.handle.by_expert
        assert by_expert is not None
        num_rows, row_of, offsets = by_expert.num_rows, by_expert.row_of, got.offsets
        overflows = limit is not None and limit < num_rows
        if overflows:
            assert limit is not None
            if not drop:
                raise ValueError(
                    f"num_permuted_tokens is {limit}, want at least the {num_rows} rows that "
                    f"arrived, or non_blocking=True to drop rows, on rank {self.rank}"
                )
            row_of = row_of.masked_fill(row_of >= limit, -1)
            offsets = offsets.clamp(max=limit)
        route = HybridRoute(
            handle=got.handle,
            token_P=token_P,
            expert_P=expert_P,
            lane_P=lane_P,
            num_experts=num_experts,
            num_topk=num_topk,
            num_rows=num_rows if limit is None else limit,
            may_drop=limit is not None and drop,
            row_of=row_of,
            num_tokens_per_expert=torch.diff(offsets.long(), prepend=offsets.new_zeros(1).long()),
        )
        config = self.configurer.buffer_config
        config.max_num_of_tokens_per_rank = max(config.max_num_of_tokens_per_rank, num_tokens)
        x, scales = _pair(got.x)
        return DispatchedWithPermute(
            _of_length(x, route.num_rows),
            None if probs is None else route.by_row(by_expert.topk_weights),
            None if scales is None else _of_length(scales, route.num_rows),
            route.num_tokens_per_expert.clone(),
            _handle_of(route, offsets, num_tokens, overflows),
        )

    def _dispatch_again(
        self, rows: Rows, probs: Tensor | None, handle: HybridHandle
    ) -> DispatchedWithPermute:
        """The way of an earlier dispatch. Probs go as rows of their own."""
        route = handle.config
        x, scales = _pair(self._buffer.dispatch(rows, handle=route.handle).recv_x)
        lanes_NK = None
        if probs is not None:
            sent = self._buffer.dispatch(route.by_lane(probs), handle=route.handle)
            lanes_NK, _ = _pair(sent.recv_x)

        def by_expert(values: Tensor) -> Tensor:
            return spread(values, route.row_of, route.num_rows, kernels=self._kernels)

        return DispatchedWithPermute(
            by_expert(x),
            None if lanes_NK is None else route.by_row(lanes_NK),
            None if scales is None else by_expert(scales),
            route.num_tokens_per_expert.clone(),
            handle,
        )


def _rows(
    hidden: Any,
    scaling_factor: Any,
    num_rows: int | str = "tokens",
    dtypes: Sequence[torch.dtype] = ROW_DTYPES,
) -> Any:
    """hidden, or the pair (hidden, scaling_factor) if it is quantised and has one."""
    if not isinstance(hidden, Tensor):
        raise validate.not_a_tensor("hidden", hidden)
    rows = validate.rows("hidden", hidden, num_rows=num_rows, dtypes=dtypes, device=hidden.device)
    return (
        rows if scaling_factor is None or rows.dtype not in _QUANTISED else (rows, scaling_factor)
    )


def _pair(rows: Rows) -> tuple[Tensor, Tensor | None]:
    return rows if isinstance(rows, tuple) else (rows, None)


def _handle_of(
    route: HybridRoute, offsets: Tensor, num_tokens: int, overflows: bool
) -> HybridHandle:
    row_of = route.row_of
    there = row_of[row_of >= 0]
    expert_of_row = torch.searchsorted(offsets, there.to(offsets.dtype), right=True)
    return HybridHandle(
        sparse_to_dense_map=None,
        rdma_to_attn_map=None,
        attn_to_rdma_map=None,
        num_dispatched_tokens_tensor=torch.tensor([len(row_of)], dtype=torch.int32, device="cpu"),
        local_expert_routing_map=None,
        dense_chunk_layout=None,
        dense_to_expert_map=row_of.clone(),  # the route goes by its own
        tokens_per_expert=torch.bincount(expert_of_row, minlength=len(offsets)).int(),
        num_of_tokens_per_rank=num_tokens,
        config=route,
        overflow_flag=torch.tensor([int(overflows)], dtype=torch.int32, device="cpu"),
    )


def _limit(value: Any, pad_multiple: int | None, non_blocking: bool) -> int | None:
    """num_permuted_tokens, which Megatron gives as a tensor."""
    if pad_multiple is not None:
        validate.integer("pad_multiple", pad_multiple, at_least=0)
    if value is None:
        validate.require(
            not non_blocking, "num_permuted_tokens is None, want a number with non_blocking=True"
        )
        return None
    if isinstance(value, Tensor):
        validate.require(
            value.numel() == 1, f"num_permuted_tokens has {value.numel()} elements, want one"
        )
        value = value.item()
    limit = validate.integer("num_permuted_tokens", value, at_least=0)
    validate.require(
        not (non_blocking and pad_multiple and limit % pad_multiple),
        f"num_permuted_tokens is {limit}, want a multiple of pad_multiple ({pad_multiple})",
    )
    return limit


def _of_length(rows: Tensor, num_rows: int) -> Tensor:
    """The first rows; zeros follow if there are fewer."""
    if len(rows) >= num_rows:
        return rows[:num_rows]
    longer = rows.new_empty(num_rows, rows.shape[1])
    longer[: len(rows)] = rows
    longer[len(rows) :].view(torch.uint8).zero_()
    return longer
