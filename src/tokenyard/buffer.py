"""Buffer: the object that users hold. DeepEP V1's signatures, on whatever hardware there is.

buffer = Buffer(group)
received, topk_idx, topk_weights, per_expert, handle, _ = buffer.dispatch(
    x, topk_idx=topk_idx, topk_weights=topk_weights, num_experts=64)
combined, _, _ = buffer.combine(experts(received), handle)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenyard.engine.gather import all_gather
from tokenyard.engine.inputs import AgainRequest, CombineRequest, DispatchRequest
from tokenyard.engine.loops import Few, Prepared, few_of
from tokenyard.engine.placed import Placed
from tokenyard.engine.prepared import Shape, checked_shape
from tokenyard.groups import LAUNCHED
from tokenyard.lifetime import Lifetime
from tokenyard.low_latency.calls import LowLatencyCalls
from tokenyard.opening import Options, open_engine, take_group
from tokenyard.replicas import Replicas
from tokenyard.results import (
    Combined,
    Dispatched,
    DispatchedByExpert,
    DispatchLayout,
    Gathered,
    Handle,
    Rows,
)
from tokenyard.runtime import observers
from tokenyard.runtime.completion import AT_ONCE, Completion
from tokenyard.runtime.events import EventHandle, EventOverlap
from tokenyard.types import Config

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AnyHandle = Handle | tuple[Any, ...]  # the tuple of its fields will do (`compat.v1_tuple`)

_CONFIG = Config()


class Buffer(Lifetime, LowLatencyCalls, Placed):
    """Moves tokens to the ranks that own their experts, and sums the results back.

    The first parameters are DeepEP's:

        group             a torch.distributed group, or an mpi4py communicator; that of
                          `local_group` if none is given
        comm              an mpi4py communicator, where there is no group
        num_nvl_bytes     memory that a rank shares for dispatch and combine on the ring transport,
                          16 MiB if 0
        low_latency_mode  adds the calls of `LowLatencyCalls`, which share memory of their own on
                          any transport
        num_rdma_bytes    bounds that memory, unless it is 0: a low-latency call that may need more
                          (see get_low_latency_rdma_size_hint) raises
        enable_shrink     low-latency calls go on without ranks that die or stall

    Those about queue pairs, NVLink and fabric memory (use_fabric, of forks) are accepted and have
    no use here. Ours are keyword only:

        transport       how rows travel; "auto" is the best there is
        kernels         the set of local kernels; "auto" is the fastest for the device
        ranks_per_node  so many ranks share a node, or, in a list, so many on each; found if None
        timeout         seconds without progress until PeerTimeout; if None TOKENYARD_TIMEOUT's, 30
        placement       [E] the rank of each expert; consecutive blocks if None. Or Replicas: which
                        experts lie in each rank's slots, where some have several copies. Then
                        topk_idx and num_experts name logical experts, and counts are by slot;
                        see sum_replicas
        balance         "exact", or a slack: ranks of a node compute for each other, so that none
                        has more than the mean of pairs and the slack, as 0.05. Rows then come for
                        all experts of the node: see get_node_experts

    Every rank of the group makes the same calls in the same order; dispatch and combine raise on
    all ranks if one of them is given bad input, and the Buffer goes on working. One thread at a
    time may call it, and only in the process that made it, not in a fork. A Buffer that nobody
    holds any more frees itself, unless explicitly_destroy is set.
    """

    def __init__(
        self,
        group: ProcessGroup | Any = LAUNCHED,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        use_fabric: bool = False,
        transport: str = "auto",
        kernels: str = "auto",
        ranks_per_node: int | Sequence[int] | None = None,
        timeout: float | None = None,
        placement: Tensor | Replicas | None = None,
        balance: float | str | None = None,
    ) -> None:
        group = take_group(group, comm)
        super().__init__(group, explicitly_destroy)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.enable_shrink = enable_shrink
        self._config = self.get_dispatch_config(0)  # of calls that give none
        options = Options(
            transport=transport,
            kernels=kernels,
            ranks_per_node=ranks_per_node,
            timeout=timeout,
            placement=placement,
            num_nvl_bytes=num_nvl_bytes,
            num_rdma_bytes=num_rdma_bytes,
            num_channels=self._config.num_channels,
            low_latency_mode=low_latency_mode,
            enable_shrink=enable_shrink,
            balance=balance,
        )
        engine, low_latency = open_engine(group, options)
        self._opened(engine, low_latency)
        self.group_size = engine.num_ranks
        self._few: Few | None = few_of(engine, self._use, self._config)
        if self._few is not None:
            self._users.add(self._few)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchLayout:
        """Who gets each token. Local: ranks exchange nothing, and bad input raises here alone."""
        layout = self._open_engine().layout(topk_idx, num_experts, previous_event)
        return DispatchLayout(
            layout.num_tokens_per_rank,
            layout.num_tokens_per_node,
            layout.num_tokens_per_expert,
            layout.is_token_in_rank,
            EventOverlap(EventHandle() if async_finish else None),
        )

    def dispatch(
        self,
        x: Rows,
        handle: AnyHandle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        num_experts: int | None = None,
        tag: int = -1,
        balanced: bool = True,
    ) -> Dispatched:
        """Send every token once to each rank that owns one of its experts.

        x is [T, D], or a pair (x [T, D], scales [T, S]) of quantised rows. Give the layout of
        get_dispatch_layout, or leave it out and give num_experts. Rows arrive by (source rank,
        token), with local expert ids, -1 where an expert lives elsewhere.

        With num_worst_tokens so many rows come back, whatever arrives: zeros, with expert ids -1,
        follow the rows that were sent, and the list of counts is empty.

        With a handle the rows go the way of an earlier dispatch, and only x and the event come
        back. It may be one of another Buffer of the same ranks, placement, nodes and transport.

        A tag is a number of your own: if ranks give different ones, all raise CallMismatch. With
        balanced=False rows go to the experts' owners, whatever the Buffer's balance.
        """
        config = self._config if config is None else config
        completion = _completion(async_finish, allocate_on_comm_stream)
        self._use.stage = "dispatch" if handle is None else "cached dispatch"
        with self._use as engine:
            if handle is None:
                request = DispatchRequest(
                    x,
                    topk_idx,
                    topk_weights,
                    num_tokens_per_rank,
                    is_token_in_rank,
                    num_tokens_per_expert,
                    num_experts,
                    expert_alignment,
                    num_worst_tokens,
                    config,
                    previous_event,
                    tag,
                    balanced,
                )
                got, made, event = engine.calls.dispatch(request, completion, "dispatch")
                recv_x, scales, recv_idx, recv_weights, per_expert = got
                counts = [] if num_worst_tokens else per_expert
                rows = recv_x if scales is None else (recv_x, scales)
                dispatched = Dispatched(rows, recv_idx, recv_weights, counts, made, event)
            else:
                routing = {
                    "num_tokens_per_rank": num_tokens_per_rank,
                    "is_token_in_rank": is_token_in_rank,
                    "num_tokens_per_expert": num_tokens_per_expert,
                    "topk_idx": topk_idx,
                    "topk_weights": topk_weights,
                    "num_experts": num_experts,
                }
                beside = [name for name, value in routing.items() if value is not None]
                along = AgainRequest(x, handle, config, beside, previous_event)
                again, scales, event = engine.calls.dispatch_again(along, completion)
                return Dispatched(_pair(again, scales), None, None, None, None, event)
        if observers.dispatched:
            if num_tokens_per_expert is not None:
                num_experts = engine.local.num_logical(num_tokens_per_expert.shape[0])
            for tell in observers.dispatched:
                tell(engine, x, topk_idx, topk_weights, num_experts)
        return dispatched

    def combine(
        self,
        x: Tensor,
        handle: AnyHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        tag: int = -1,
        out: Tensor | None = None,
    ) -> Combined:
        """Send every row of x back to its token's rank, which sums a token's rows.

        The sum is unweighted (weigh the rows before), in float32, starts from the biases, and adds
        in an order that is always the same. topk_weights, if given, come back as they were sent
        out. A tag is that of dispatch.

        With out, a contiguous [T, D] tensor of x's dtype, the sums are written there and no memory
        is taken for them; Combined.x shares its memory. It must share none with x, topk_weights or
        bias. With async_finish it is written when the event is over: leave it alone until then.
        """
        config = self._config if config is None else config
        request = CombineRequest(x, handle, topk_weights, bias, out, config, previous_event, tag)
        completion = _completion(async_finish, allocate_on_comm_stream)
        self._use.stage = "combine"
        with self._use as engine:
            return Combined(*engine.calls.combine(request, completion, "combine"))

    def dispatch_by_expert(
        self,
        x: Rows,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        num_experts: int,
        expert_alignment: int = 1,
        tag: int = -1,
        balanced: bool = True,
    ) -> DispatchedByExpert:
        """Send every token to each of its experts: rows arrive as a grouped GEMM wants them.

        What comes back is that of dispatch and then tokenyard.permute:

            x                      [M, D], or the pair (x, scales) of quantised rows: a row for each
                                   (token, local expert), by (expert, source rank, token)
            offsets                [L] int32, where each expert's rows end: `offs` of grouped_mm
            num_tokens_per_expert  L, how many rows each expert has
            handle                 for combine_by_expert

        Zeros pad each expert's rows to a multiple of expert_alignment, and count. A tag and
        balanced are those of dispatch. The handle also is that of dispatch: combine takes rows by
        (source rank, token) with it.
        """
        config = self._config
        request = DispatchRequest.plain(
            x, topk_idx, topk_weights, num_experts, expert_alignment, config, tag, balanced
        )
        self._use.stage = "dispatch by expert"
        with self._use as engine:
            got, handle = engine.calls.dispatch_by_expert(request)
        for tell in observers.dispatched:
            tell(engine, x, topk_idx, topk_weights, num_experts)
        return DispatchedByExpert(
            _pair(got.x, got.scales), got.offsets, got.num_tokens_per_expert, handle
        )

    def combine_by_expert(
        self,
        y: Tensor,
        handle: AnyHandle,
        *,
        weigh: bool = True,
        out: Tensor | None = None,
        tag: int = -1,
    ) -> Tensor:
        """[T, D]: for each token the sum over its experts of weight times their row of y [M, D].

        The weights are those that dispatch_by_expert was given; with weigh=False rows are summed as
        they are. Each rank's rows of a token are summed in float32, by k, and rounded; then the
        ranks' sums are added as combine adds rows. So it is tokenyard.unpermute and then combine.

        Rows in the memory of dispatch_by_expert's x or of get_next_combine_buffer are read by other
        ranks where they lie. out and tag are those of combine.
        """
        self._use.stage = "combine by expert"
        with self._use as engine:
            config = self._config
            request = CombineRequest.plain(y, handle, out, config, tag)
            return engine.calls.combine_by_expert(request, weigh)

    def prepare(
        self,
        *,
        max_tokens: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        dtype: torch.dtype = torch.bfloat16,
        by_expert: bool = True,
        expert_alignment: int = 1,
    ) -> Prepared:
        """A dispatch and a combine of one shape, prepared once: for loops of few tokens.

        They do what dispatch_by_expert and combine_by_expert do, or, with by_expert=False, dispatch
        and combine, in a fraction of the time: memory is taken here, and rows lie in it by turns
        (see `Prepared`). Local: ranks exchange nothing yet. By source their max_tokens must be the
        same.
        """
        with self._use as engine:
            config = self._config
            routing = num_topk, num_experts, dtype, by_expert, expert_alignment
            shape = checked_shape(engine, Shape(max_tokens, hidden, *routing, config))
            prepared = Prepared(self, self._use, engine, shape)
            self._users.add(prepared)
            return prepared

    def all_gather(self, x: Tensor, handle: AnyHandle | None = None) -> Gathered:
        """x [T, ...] of every rank, one rank after the other, on all ranks: [sum of T, ...].

        Each rank may have another T, also 0; the rest of the shape and the dtype, which may be any,
        must be the same. combine(y, handle) is the way back: it gives each rank, for each of its
        rows, the sum over ranks of what they have in its place. With the handle of an earlier
        all_gather, rows go the same way again without counting: T must be the same then.

        DeepEP has no such call. It is meant for few numbers, and for tokens that all ranks need:
        every rank gets every row.
        """
        self._use.stage = "all_gather"
        with self._use as engine:
            return Gathered(*all_gather(engine, x, handle, self._config))

    def get_next_combine_buffer(self, handle: AnyHandle) -> Tensor:
        """[N, D] memory for the experts' output, which combine need not copy; [M, D] for
        combine_by_expert with a handle of dispatch_by_expert.

        Its dtype is x's, or bfloat16 where x was quantised. It stays yours while you hold it.
        """
        with self._use as engine:
            return engine.combine_buffer(handle)

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.group_size}"
        if self._engine is None:
            return f"<tokenyard.Buffer {where}, {self._why_closed}>"
        nodes = self._engine.topology.num_nodes
        return (
            f"<tokenyard.Buffer {where} on {nodes} node{'s' * (nodes > 1)}, "
            f"{self._engine.transport.name}>"
        )

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """A Config that works for any number of ranks."""
        return _CONFIG


def _pair(x: Tensor, scales: Tensor | None) -> Rows:
    return x if scales is None else (x, scales)


def _completion(async_finish: bool, on_comm_stream: bool) -> Completion:
    return Completion(async_finish, on_comm_stream) if async_finish or on_comm_stream else AT_ONCE
