"""ElasticBuffer: DeepEP V2's signatures, over the engine of Buffer.

buffer = ElasticBuffer(group, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8)
rows, _, weights, handle, _ = buffer.dispatch(
    x, topk_idx, topk_weights, num_experts=64, do_expand=True)
combined, _, _ = buffer.combine(experts(rows, weights), handle)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from tokenyard import validate
from tokenyard.compat.elastic.combine import combine
from tokenyard.compat.elastic.dispatch import Asked, by_column, dispatch, dispatch_again
from tokenyard.compat.elastic.domains import buffer_size, find_domains
from tokenyard.compat.elastic.engram import EngramCalls
from tokenyard.compat.elastic.handle import EPHandle
from tokenyard.compat.elastic.pipeline import PipelineCalls
from tokenyard.compat.elastic.refusal import heard_by_all
from tokenyard.compat.elastic.sessions import SessionCalls
from tokenyard.engine.agreement import Call, Terms
from tokenyard.engine.engine import Engine
from tokenyard.engine.mismatch import STAGES
from tokenyard.opening import Options, open_engine, take_group
from tokenyard.runtime import observers
from tokenyard.runtime.events import EventHandle, EventOverlap
from tokenyard.types import Config

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Rows = Tensor | tuple[Tensor, Tensor]

_NUM_SMS = 20
_QPS_HYBRID, _QPS_DIRECT = 65, 17  # what V2 allocates


class ElasticDispatched(NamedTuple):
    """What ElasticBuffer.dispatch returns, in DeepEP V2's order."""

    recv_x: Rows
    recv_topk_idx: Tensor | None
    recv_topk_weights: Tensor | None
    handle: EPHandle
    event: EventOverlap


class ElasticCombined(NamedTuple):
    """What ElasticBuffer.combine returns, in DeepEP V2's order."""

    combined_x: Tensor
    combined_topk_weights: Tensor | None
    event: EventOverlap


_V2_TIMEOUTS = 300, 100  # the defaults of DeepEP V2, seconds


class ElasticBuffer(EngramCalls, PipelineCalls, SessionCalls):
    """Moves tokens to the ranks, or straight to the experts, that they chose, and sums them back.

    The first parameters are DeepEP V2's. These mean something here:

        num_max_tokens_per_rank   the default of dispatch; the same on all ranks
        allow_hybrid_mode         on several nodes, combine rounds the sum of each node
        allow_multiple_reduction  False: combine sums all rows of an expanded dispatch at once
        num_cpu_timeout_secs, num_gpu_timeout_secs
                                  the smaller is `timeout`, unless that is given; if none of the
                                  three is, `timeout` is Buffer's
        explicitly_destroy        as Buffer's

    Memory is taken as calls need it: num_bytes, or what V2 would make of hidden, num_topk and
    use_fp8_dispatch, is kept as an attribute. Results are always deterministic. Those about queue
    pairs, service levels and overlap are accepted and have no use here. Ours are Buffer's, keyword
    only: transport, kernels, ranks_per_node, timeout, placement.

    Every rank of the group makes the same calls in the same order, as with Buffer.
    """

    def __init__(
        self,
        group: ProcessGroup | Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
        *,
        transport: str = "auto",
        kernels: str = "auto",
        ranks_per_node: int | Sequence[int] | None = None,
        timeout: float | None = None,
        placement: Tensor | None = None,
    ) -> None:
        group = take_group(group)
        super().__init__(group, explicitly_destroy)
        if timeout is None:
            given = num_cpu_timeout_secs, num_gpu_timeout_secs
            timeout = None if given == _V2_TIMEOUTS else min(given)
        engine, _ = open_engine(
            group,
            Options(
                transport=transport,
                kernels=kernels,
                ranks_per_node=ranks_per_node,
                timeout=timeout,
                placement=placement,
                num_nvl_bytes=0,
                num_rdma_bytes=0,
                num_channels=_config(_NUM_SMS).num_channels,
                low_latency_mode=False,
                enable_shrink=False,
                takes_replicas=False,
            ),
        )
        self._opened(engine, None)
        self.rank_idx, self.num_ranks = engine.rank, engine.num_ranks
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.deterministic = deterministic
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_cpu_bytes = num_cpu_bytes
        if num_bytes is None:
            sizes = num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
            num_bytes = buffer_size(self.num_ranks, *sizes, allow_multiple_reduction)
        self.num_bytes = num_bytes
        if num_allocated_qps == 0:
            num_allocated_qps = _QPS_HYBRID if allow_hybrid_mode else _QPS_DIRECT
        self.num_allocated_qps = num_allocated_qps
        self._domains = find_domains(
            engine.topology, bool(allow_hybrid_mode), bool(allow_multiple_reduction)
        )
        self.num_rdma_ranks, self.num_nvlink_ranks = self._domains.physical
        self.num_scaleout_ranks, self.num_scaleup_ranks = self._domains.logical
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(
            self.rank_idx, self.num_scaleup_ranks
        )

    @property
    def runtime(self) -> Engine | None:
        """The engine; None once the buffer is destroyed."""
        return self._engine

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> ElasticDispatched:
        """Send every token to each rank that owns one of its experts.

        x is [T, D], or a pair (x [T, D], scales [T, S]) of quantised rows. Compact, a rank gets a
        token once: rows by (source rank, token), with local expert ids, -1 where an expert lives
        elsewhere. With do_expand it gets a row for each local expert of the token: rows by (expert,
        source rank, token), which start at multiples of expert_alignment, zeros between, and the
        weight of each row.

        Without do_cpu_sync as many rows come back as could come: zeros, with ids of -1, follow
        those that do. With num_max_tokens_per_rank, all ranks give the same.

        With a handle rows go the way of an earlier dispatch. The same handle comes back, and local
        expert ids again, and weights if topk_weights are given.

        The call has ended when it returns, also with async_with_compute_stream.
        """
        config = _config(num_sms or _NUM_SMS)
        self._use.stage = "dispatch"
        with self._use as engine:
            with heard_by_all(engine, "dispatch"):
                _wait(previous_event, previous_event_before_epilogue)
                if handle is not None:
                    validate.require(
                        topk_idx is None, "topk_idx given with a handle, which has it already"
                    )
                    validate.require(
                        not do_cpu_sync, "do_cpu_sync is True, want no counting with a handle"
                    )
                    _check_same(handle, num_experts, num_max_tokens_per_rank, expert_alignment)
            if handle is None:
                num_max = num_max_tokens_per_rank
                asked = Asked(
                    x,
                    topk_idx,
                    topk_weights,
                    cumulative_local_expert_recv_stats,
                    num_experts,
                    self.num_max_tokens_per_rank if num_max is None else num_max,
                    1 if expert_alignment is None else expert_alignment,
                    bool(do_handle_copy),
                    do_cpu_sync is None or bool(do_cpu_sync),
                    bool(do_expand),
                )
                got = dispatch(engine, asked, config, self.num_scaleup_ranks)
            else:
                got = dispatch_again(engine, x, topk_weights, handle, bool(do_expand), config)
        for tell in observers.dispatched:
            tell(engine, x, topk_idx, topk_weights, num_experts)
        scales = got.scales
        if scales is not None and use_tma_aligned_col_major_sf:
            scales = by_column(scales)
        return ElasticDispatched(
            got.x if scales is None else (got.x, scales),
            got.topk_idx,
            got.topk_weights,
            got.handle,
            _over(async_with_compute_stream),
        )

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> ElasticCombined:
        """Send every row of x back to its token's rank, which sums a token's rows.

        The sum is unweighted, in float32, starts from the biases, and adds what ranks send by the
        last top-k lane that each has: `spec.elastic_combine` has the order and the rounding.
        topk_weights, [N, K] or [M] if expanded, come back as [T, K] from the expert's rank.
        """
        self._use.stage = "combine"
        with self._use as engine:
            with heard_by_all(engine, "combine"):
                _wait(previous_event, previous_event_before_epilogue)
                config = _config(num_sms or getattr(handle, "num_sms", _NUM_SMS))
            sums, weights = combine(
                engine,
                x,
                handle,
                topk_weights,
                bias,
                config,
                self._domains,
                bool(self.allow_multiple_reduction),
            )
        return ElasticCombined(sums, weights, _over(async_with_compute_stream))

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Wait until all ranks are here, and all their calls have ended."""
        self._use.stage = "barrier"
        with self._use as engine:
            engine.worker.drain()
            call = Call(stage=STAGES.index("barrier"))
            engine.agreement.meet("barrier", Terms(call))

    @staticmethod
    def capture() -> EventHandle:
        """An event that is over when all work submitted so far is."""
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Nodes, and ranks on each; (1, ranks) where nodes differ in size."""
        return self._domains.physical

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Nodes, and ranks on each, with allow_hybrid_mode; else (1, ranks)."""
        return self._domains.logical

    def get_theoretical_num_sms(
        self,
        num_experts: int | None,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Always 20: a CPU has no SMs, and threads are torch's number."""
        return _NUM_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """What V2 would say. There are no queue pairs here."""
        wanted = num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)

    @staticmethod
    def get_buffer_size_hint(
        group: ProcessGroup | Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that the largest dispatch and its combine may take: a multiple of 2 MB."""
        sizes = num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
        return buffer_size(group.size(), *sizes, allow_multiple_reduction)

    def _close(self) -> None:
        pipe, self._pipe = self._pipe, None
        self._results = self._table = self._table_block = None
        if pipe is not None:
            pipe.close()
        super()._close()

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.num_ranks}"
        if self._engine is None:
            return f"<tokenyard.ElasticBuffer {where}, {self._why_closed}>"
        return f"<tokenyard.ElasticBuffer {where}, {self._engine.transport.name}>"


def _wait(*events: Any) -> None:
    for event in events:
        if event is not None:
            if isinstance(event, EventHandle):
                event = EventOverlap(event)
            pending = validate.previous_event(event)
            if pending is not None:
                pending.current_stream_wait()


def _over(wanted: bool) -> EventOverlap:
    return EventOverlap(EventHandle() if wanted else None)


def _check_same(handle: Any, num_experts: Any, num_max: Any, alignment: Any) -> None:
    """What is given beside a handle must be what the handle has."""
    beside = {
        "num_experts": num_experts,
        "num_max_tokens_per_rank": num_max,
        "expert_alignment": alignment,
    }
    for name, value in beside.items():
        known = getattr(handle, name, None)
        if value is not None and value != known:
            raise ValueError(f"{name} is {value}, want {known}, that of the handle")


@cache
def _config(num_sms: int) -> Config:
    return Config(num_sms)
