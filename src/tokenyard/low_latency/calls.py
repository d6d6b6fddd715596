"""The part of Buffer that is DeepEP's low-latency mode: its signatures; `engine` does the work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from tokenyard.errors import BufferClosed
from tokenyard.low_latency import forks
from tokenyard.low_latency.engine import LowLatency
from tokenyard.low_latency.handle import COMBINE, DISPATCH, STAGE_OF, LowLatencyHandle
from tokenyard.low_latency.inputs import most_bytes
from tokenyard.runtime import observers
from tokenyard.runtime.completion import AT_ONCE, Completion, RecvHook
from tokenyard.runtime.events import EventOverlap


class LowLatencyDispatched(NamedTuple):
    """What low_latency_dispatch returns. `hook` receives, where return_recv_hook was given."""

    recv_x: Tensor | tuple[Tensor, Tensor]
    recv_count: Tensor
    handle: LowLatencyHandle
    event: EventOverlap
    hook: Callable[[], None] | None


class LowLatencyCombined(NamedTuple):
    """What low_latency_combine returns. `hook` receives, where return_recv_hook was given."""

    combined_x: Tensor
    event: EventOverlap
    hook: Callable[[], None] | None


class LowLatencyCalls:
    """For few tokens, as in decoding. Needs Buffer(low_latency_mode=True).

    A token is copied to each of its experts. Ranks exchange no counts first, so recv_x has room for
    all that could come: num_max_dispatch_tokens_per_rank tokens of every rank, a number that is the
    same on all ranks, and that no call may exceed. A result is yours while you hold recv_x.

    Arguments of DeepEP's forks are taken by name too (see `forks`).
    """

    _use: Any  # a context of one call at a time
    _low_latency: LowLatency | None

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        **fork: Any,
    ) -> LowLatencyDispatched:
        """Send every token to each of its experts.

        recv_x is [local experts, ranks * num_max, hidden], in FP8 a pair with its scales; the first
        recv_count[e] rows of expert e are valid, by (source rank, token). A token names an expert
        once at most.

        With return_recv_hook nothing is received before the hook is called; with async_finish it is
        received on the Buffer's thread. Counts are added to cumulative_local_expert_recv_stats
        (int32, one a local expert), and the nanoseconds until each rank's tokens were there to
        dispatch_wait_recv_cost_stats (int64, one a rank).
        """
        completion = AT_ONCE
        wrong = forks.check_dispatch(fork) if fork else None
        if async_finish or return_recv_hook or dispatch_wait_recv_cost_stats is not None:
            completion = Completion(
                async_finish, False, return_recv_hook, dispatch_wait_recv_cost_stats
            )
        self._use.stage = STAGE_OF[DISPATCH]
        chosen = topk_idx  # by the router, who knows no copies
        with self._use as opened:
            engine = self._low_latency or self._open_low_latency(is_open=True)
            if wrong is not None:
                engine.refuse(DISPATCH, ValueError(wrong))
            if engine.local.choice is not None:
                topk_idx = engine.chosen(DISPATCH, topk_idx)
            got, handle, event, later = engine.dispatch(
                completion,
                x,
                topk_idx,
                num_max_dispatch_tokens_per_rank,
                num_experts,
                cumulative_local_expert_recv_stats,
                (use_fp8, round_scale, use_ue8m0),
            )
        for tell in observers.dispatched:
            tell(opened, x, chosen, None, num_experts)
        recv_x = got.x if got.scales is None else (got.x, got.scales)
        hook = partial(self._receive, later) if return_recv_hook and later else None
        return LowLatencyDispatched(recv_x, got.counts, handle, event, hook)

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        **fork: Any,
    ) -> LowLatencyCombined:
        """Every token gets the sum of weight * row over its experts, in top-k order.

        x has the shape of recv_x. topk_idx is that of the dispatch, or some of it, with -1 for what
        shall not be summed. With zero_copy the rows are those of the last tensor that
        get_next_low_latency_combine_buffer gave for this handle, whatever x holds. Other ranks read
        it where it lies: leave it alone afterwards, and ask for the next.

        With use_logfmt the rows, of bfloat16, lose what DeepEP's LogFMT loses (see `logfmt`).
        """
        completion = AT_ONCE
        wrong = forks.check_combine(fork, x) if fork else None
        if async_finish or return_recv_hook or combine_wait_recv_cost_stats is not None:
            completion = Completion(
                async_finish, False, return_recv_hook, combine_wait_recv_cost_stats
            )
        self._use.stage = STAGE_OF[COMBINE]
        with self._use:
            engine = self._low_latency or self._open_low_latency(is_open=True)
            if wrong is not None:
                engine.refuse(COMBINE, ValueError(wrong))
            if engine.local.choice is not None:
                topk_idx = engine.chosen(COMBINE, topk_idx)
            combined, event, later = engine.combine(
                completion, x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, out
            )
        hook = partial(self._receive, later) if return_recv_hook and later else None
        return LowLatencyCombined(combined, event, hook)

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """[local experts, ranks * num_max, hidden] for the experts' output, for zero_copy."""
        return self._open_low_latency().combine_buffer(handle)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Meet all ranks, as DeepEP does. Nothing needs cleaning: signals only grow.

        A rank that is dead or silent raises, or is left out with enable_shrink. It counts as a
        dispatch.
        """
        with self._use:
            engine = self._low_latency or self._open_low_latency(is_open=True)
            engine.clean(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out, or wait for it again. Each rank decides for itself.

        A rank that is taken in again must have made all calls in the meantime.
        """
        self._open_low_latency().change_mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write 1 for each rank that is left out into mask_status (int32, one a rank), else 0."""
        self._open_low_latency().query_masks(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Leave nobody out any more."""
        self._open_low_latency().unmask_all()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """The most bytes that calls of these sizes share with other ranks, for two-byte elements.

        Buffer(num_rdma_bytes=) takes it as the bound of the mode, beside num_nvl_bytes: a call that
        may need more raises ValueError. Memory is taken when it is needed.
        """
        return most_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def _receive(self, hook: RecvHook) -> None:
        """What the user's hook does. Called a second time it does nothing."""
        if not hook.is_over or hook.refused is not None:
            self._use.stage = "low-latency receive"
            try:
                with self._use:
                    hook()
            except BufferClosed:
                hook.look()
                raise

    def _open_low_latency(self, is_open: bool = False) -> LowLatency:
        """`is_open` inside a call, which has looked already."""
        raise NotImplementedError
