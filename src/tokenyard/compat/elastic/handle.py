"""EPHandle: what an ElasticBuffer's dispatch returns for combine, and for dispatches along it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tokenyard.engine.lane_order import Lanes, find_lanes
from tokenyard.results import Handle, ListedLedger
from tokenyard.transports import Transport
from tokenyard.types import round_up


@dataclass(kw_only=True, eq=False)
class Kept:
    """What a handle keeps of its dispatch, from which its fields are made when first read."""

    handle: Handle  # the engine's
    topk_idx_TK: Tensor
    rank_of_expert_E: Tensor
    # [N, K] int64, below 0 where an expert lives elsewhere: local ids, or rows if expanded
    place_NK: Tensor
    counts_L: list[int]  # rows of each expert, without padding
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_scaleup_ranks: int
    do_expand: bool
    num_rows: int  # of recv_x
    is_listed: bool | None = None  # whether the engine's combines add by lane; None: not asked yet

    @cached_property
    def lanes(self) -> Lanes:
        return find_lanes(self.topk_idx_TK, self.rank_of_expert_E)

    def list_by_lane(self, transport: Transport) -> bool:
        """Let the engine's combines add a token's rows by last lane. False if they cannot."""
        if self.is_listed is None:
            flow, ledger = self.handle.flow, self.handle.ledger
            where = flow.route, self.topk_idx_TK, self.rank_of_expert_E
            self.is_listed = transport.list_by_lane(*where)
            if self.is_listed:  # calls go by the ledger, whose own lists are by rank
                marks = ledger.is_token_in_rank
                self.handle.ledger = ListedLedger(flow, marks, ledger.src_idx)
        return self.is_listed

    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        counts, places = self.handle.flow.recv_counts, range(self.num_scaleup_ranks)
        from_place = [sum(counts[place :: self.num_scaleup_ranks]) for place in places]
        return self._ints(list(accumulate(from_place)))

    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        aligned = self.aligned_L()
        ends = list(accumulate(aligned))
        if self.do_expand:
            sizes = zip(ends, aligned, self.counts_L)
            ends = [end - size + count for end, size, count in sizes]
        return self._ints(ends)

    def num_unaligned_recv_tokens_per_expert(self) -> Tensor:
        return self._ints(self.counts_L)

    def aligned_L(self) -> list[int]:
        return [round_up(count, self.expert_alignment) for count in self.counts_L]

    def recv_src_metadata(self) -> Tensor:
        flow, place = self.handle.flow, self.place_NK
        (num_rows, num_topk), num_received = place.shape, flow.num_received
        told = torch.full((num_rows, 2 + num_topk), -1, dtype=torch.int32, device=place.device)
        ranks = torch.arange(len(flow.recv_counts), dtype=torch.int32, device=place.device)
        counts = torch.tensor(flow.recv_counts, device=place.device)
        source = torch.repeat_interleave(ranks, counts)
        own = place[:num_received] >= 0
        lanes = torch.arange(num_topk, dtype=torch.int32, device=place.device)
        last = torch.where(own, lanes, -1).amax(1)
        tokens = self.handle.recv_src_idx[:num_received]
        told[:num_received, 0] = source * self.num_max_tokens_per_rank + tokens
        told[:num_received, 1] = source % self.num_scaleup_ranks * num_topk + last
        if self.do_expand:
            told[:num_received, 2:] = place[:num_received]
        return told

    def dst_buffer_slot_idx(self) -> Tensor:
        """[T, K] int32, at each rank's last lane: the token's row among those that go there."""
        lanes, counts = self.lanes, self.handle.flow.route.send_counts
        begins = torch.tensor([*accumulate((0, *counts[:-1])), 0], device=lanes.rank_TK.device)
        rows = lanes.home_rows(lanes.is_last_TK)
        return torch.where(lanes.is_last_TK, rows - begins[lanes.rank_TK], -1).int()

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.place_NK.device)


_MADE_WHEN_READ = (
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
)


class EPHandle:
    """DeepEP V2's handle. Its fields are plain attributes, which may be read and set:

        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms
        topk_idx                               [T, K], a copy with do_handle_copy
        num_recv_tokens, num_expanded_tokens   rows that came, with room for more without
                                               do_cpu_sync; rows of recv_x
        num_recv_tokens_per_expert_list        L, aligned; empty without do_cpu_sync
        psum_num_recv_tokens_per_scaleup_rank  [S] int32
        psum_num_recv_tokens_per_expert        [L] int32
        num_unaligned_recv_tokens_per_expert   [L] int32
        recv_src_metadata                      [N, 2 + K] int32
        dst_buffer_slot_idx                    [T, K] int32

    `tokenyard.spec.elastic` says what they hold. token_metadata_at_forward and channel_linked_list
    are None. combine and dispatch go by what the handle keeps besides: setting a field changes
    nothing there, and a handle that no dispatch made is refused.
    """

    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: Tensor,
        num_recv_tokens: int,
        num_expanded_tokens: int,
        num_recv_tokens_per_expert_list: list[int],
        psum_num_recv_tokens_per_scaleup_rank: Tensor | None = None,
        psum_num_recv_tokens_per_expert: Tensor | None = None,
        num_unaligned_recv_tokens_per_expert: Tensor | None = None,
        recv_src_metadata: Tensor | None = None,
        dst_buffer_slot_idx: Tensor | None = None,
        token_metadata_at_forward: Tensor | None = None,
        channel_linked_list: Tensor | None = None,
        *,
        kept: Kept | None = None,
    ) -> None:
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.topk_idx = topk_idx
        self.num_recv_tokens = num_recv_tokens
        self.num_expanded_tokens = num_expanded_tokens
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self.token_metadata_at_forward = token_metadata_at_forward
        self.channel_linked_list = channel_linked_list
        self._kept = kept
        given = (
            psum_num_recv_tokens_per_scaleup_rank,
            psum_num_recv_tokens_per_expert,
            num_unaligned_recv_tokens_per_expert,
            recv_src_metadata,
            dst_buffer_slot_idx,
        )
        for name, value in zip(_MADE_WHEN_READ, given, strict=True):
            if value is not None or kept is None:
                setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        kept = self.__dict__.get("_kept")
        if name not in _MADE_WHEN_READ or kept is None:
            raise AttributeError(f"'EPHandle' object has no attribute {name!r}")
        value = getattr(kept, name)()
        setattr(self, name, value)
        return value

    def __repr__(self) -> str:
        kind = "expanded" if self.do_expand else "compact"
        return (
            f"<tokenyard.EPHandle, {kind}: {self.topk_idx.shape[0]} tokens sent, "
            f"{self.num_expanded_tokens} rows of recv_x>"
        )


def kept_of(handle: Any) -> Kept:
    """Raises ValueError if no dispatch has made this handle."""
    kept = handle._kept if isinstance(handle, EPHandle) else None
    if not isinstance(kept, Kept):
        raise ValueError(
            f"handle is {type(handle).__name__}, want the EPHandle that an ElasticBuffer's "
            "dispatch returned"
        )
    return kept
