"""The low-latency mode: fixed slots instead of counts, and no round in which ranks agree.

A call sends without waiting for other ranks, and then receives. A rank checks its input before it
sends. If the input is bad, the rank sends the reason instead of tokens: the others raise it when
they receive, and every rank is ready for the next call.

Where ranks share no memory they agree before rows travel, as in every other call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.comm.base import Communicator
from tokenyard.engine.agreement import stage_in
from tokenyard.engine.engine import Engine
from tokenyard.engine.failure import raised_on_all_ranks
from tokenyard.engine.mismatch import STAGES, differ
from tokenyard.errors import CallMismatch, PeerError
from tokenyard.kernels import Kernels
from tokenyard.low_latency import logfmt
from tokenyard.low_latency.exchanged import ExchangedSlots
from tokenyard.low_latency.handle import STAGE_OF, LowLatencyHandle, PendingCombine
from tokenyard.low_latency.inputs import Fp8, Inputs, bad_pair, counters, unsent_pair
from tokenyard.low_latency.result_memory import Arrived, Results
from tokenyard.low_latency.shared_slots import SharedSlots
from tokenyard.runtime import memory
from tokenyard.runtime.completion import AT_ONCE, Completion, RecvEvent, RecvHook
from tokenyard.runtime.events import EventOverlap
from tokenyard.wire.slots import COMBINE, DISPATCH, Stray

_LEAVING = 5.0  # seconds that a Buffer waits, when it is closed, for others to map its memory


class _Unread(ValueError):
    """What was sent two calls ago has not been received here yet."""


class LowLatency:
    def __init__(
        self,
        engine: Engine,
        kernels: Kernels,
        enable_shrink: bool,
        num_bytes: int,
        connect_all: Callable[[], Communicator],
    ) -> None:
        """All ranks together, beside the engine of the other mode. `num_bytes` is what calls may
        need at most, 0 for no bound; `connect_all` gives connections of its own, if it needs any.
        """
        self._rank, self._size = engine.rank, engine.num_ranks
        self._kernels = kernels
        self._agreement, self._worker = engine.agreement, engine.worker
        self._failure = engine.failure  # after which nothing may be called again
        self._buffer_id, self._shrink = engine.buffer_id, enable_shrink
        stage = "Buffer (low latency)"
        self.slots = _open_exchange(engine, kernels, enable_shrink, stage, connect_all)
        if isinstance(self.slots, SharedSlots):
            own = weakref.WeakMethod(self._differs)  # slots must not keep who keeps them

            def differs(stage: str, rank: int, theirs: int | np.ndarray) -> None:
                tell = own()
                assert tell is not None, "a call that waits in the slots holds this object"
                tell(stage, rank, theirs)

            self.slots.posts.watch(differs)
        # True from where a call has a number until it has ended, or has told all other ranks why it
        # will not. If an exception leaves the call in between, this rank is out of step with them.
        self.engaged = False
        self.numbers = [0, 0]  # calls so far, by kind
        self._unread: dict[tuple[int, int], tuple[int, weakref.ref[RecvHook]]] = {}
        self._inputs = Inputs(engine.local, self._rank, self._size, self._buffer_id, num_bytes)
        self.local = engine.local
        self._results = Results()

    def forget(self) -> None:
        """Make plans anew: the placement has changed. What was sent can still be received."""
        self._inputs.forget()
        if isinstance(self.slots, SharedSlots):
            self.slots.forget()

    def chosen(self, kind: int, topk_idx: Any) -> Any:
        """topk_idx with physical experts, where experts have copies."""
        assert self.local.choice is not None
        try:
            return self.local.choice.before_checks(topk_idx)
        except ValueError as error:
            self.refuse(kind, error)

    def wait_to_leave(self) -> None:
        """Before the Buffer is closed: wait until all ranks have mapped memory that it named."""
        if isinstance(self.slots, SharedSlots):
            self.slots.wait_to_leave(_LEAVING)

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        num_max: Any,
        num_experts: Any,
        totals: Any,
        fp8: Fp8,
        completion: Completion,
    ) -> tuple[Arrived, LowLatencyHandle, EventOverlap, RecvHook | None]:
        """`totals`, if given, are increased by each expert's count."""
        number = self._begin(DISPATCH)
        try:
            if self._unread:
                self._settle(DISPATCH, number)
            if completion is not AT_ONCE:
                self._inputs.completion(completion)
            x, topk_idx, shape = self._inputs.tokens(x, topk_idx, num_max, num_experts, fp8)
            if totals is not None:
                totals = counters(
                    "cumulative_local_expert_recv_stats", totals, shape.num_local, torch.int32
                )
            handle = LowLatencyHandle(shape, topk_idx.shape[0], self._buffer_id, number)
            out = self._results.take(shape, number)
            bad = self.slots.send_dispatch(number, x, topk_idx, handle, out, totals)
            if bad != -1:
                raise bad_pair(topk_idx, bad, shape)
        except Exception as error:
            raise self._ended(DISPATCH, number, error) from None

        held = out, totals, handle.memory
        receive = partial(self.slots.receive, DISPATCH, number, held, completion.waits)
        event, handle.hook = self._end(DISPATCH, number, receive, completion)
        self.engaged = False
        return out, handle, event, handle.hook

    def combine(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: Any,
        use_logfmt: bool,
        zero_copy: bool,
        out: Any,
        completion: Completion,
    ) -> tuple[Tensor, EventOverlap, RecvHook | None]:
        number = self._begin(COMBINE)
        try:
            if self._unread:
                self._settle(COMBINE, number)
            if completion is not AT_ONCE:
                self._inputs.completion(completion)
            known, y, topk_idx, weights = self._inputs.rows(x, topk_idx, topk_weights, handle)
            if use_logfmt:
                logfmt.check(y, zero_copy)
            if zero_copy:
                y = self._lent(known, y)
            if out is None:
                out = memory.empty(known.num_tokens, known.shape.hidden, dtype=y.dtype)
            else:
                validate.out(out, known.num_tokens, y)
            sums = out
            if use_logfmt:
                y = logfmt.cast(self._kernels, y, known)
                sums = memory.empty(*out.shape, dtype=y.dtype)
            back = PendingCombine(y, y.dtype, topk_idx, weights, known, zero_copy)
            if completion.is_later:  # the user may write to his tensors once this has returned
                own = y if zero_copy or use_logfmt else None
                back = back._replace(own=own, topk_idx=topk_idx.clone(), weights=weights.clone())
            bad = self.slots.send_combine(number, y, back, sums)
            if bad != -1:
                raise unsent_pair(topk_idx, bad)
        except Exception as error:
            raise self._ended(COMBINE, number, error) from None

        known.lent = ()
        receive = partial(self.slots.receive, COMBINE, number, (back, sums), completion.waits)
        if use_logfmt:
            receive = partial(logfmt.receive_and_round, receive, sums, out)
        event, hook = self._end(COMBINE, number, receive, completion)
        self.engaged = False
        return out, event, hook

    def combine_buffer(self, handle: Any) -> Tensor:
        """[L, S, D] for the experts' output, where combine finds it without copying."""
        try:
            known = self._inputs.known(handle)
        except ValueError as error:
            raise self._agreement.named("get_next_low_latency_combine_buffer", error) from None
        dtype = known.shape.dtype
        if dtype not in validate.SUMMABLE:
            dtype = torch.bfloat16
        lent = self.slots.combine_buffer(known.shape, dtype)
        known.lent = *known.lent, lent
        return lent

    def clean(self, num_max: Any, hidden: Any, num_experts: Any) -> None:
        """Meet all ranks, and find those that are dead: a dispatch without tokens."""
        try:
            width = validate.integer("hidden", hidden, at_least=1)
        except ValueError as error:
            self.refuse(DISPATCH, error)
        x = torch.empty(0, width, dtype=torch.bfloat16, device="cpu")
        topk_idx = torch.empty(0, 1, dtype=torch.int64, device="cpu")
        plain = False, False, False
        self.dispatch(x, topk_idx, num_max, num_experts, None, plain, AT_ONCE)

    def refuse(self, kind: int, error: Exception) -> NoReturn:
        """Make no call, since this rank was given what it cannot do. All ranks raise."""
        raise self._fail(kind, self._begin(kind), error) from None

    def _lent(self, known: LowLatencyHandle, y: Tensor) -> Tensor:
        """What a zero_copy combine sends: y if it is a buffer of this handle, else the last buffer
        that was given for the handle. As in DeepEP, y then only has the shape.
        """
        if known.lent:
            is_one = any(y.data_ptr() == one.data_ptr() for one in known.lent)
            return y if is_one else known.lent[-1]
        validate.require(
            self.slots.is_shared(y),
            "x is not the tensor of get_next_low_latency_combine_buffer, want that, or another x "
            "after that tensor was filled, with zero_copy=True",
        )
        return y

    def mask(self, rank: Any, masked: bool) -> None:
        self._check_shrink()
        validate.integer("rank_to_mask", rank, at_least=0, at_most=self._size - 1)
        validate.require(rank != self._rank, f"rank_to_mask is {rank}, want another rank than this")
        if not masked:
            self._let_receives_end()
        self.slots.mask(rank, bool(masked))

    def unmask_all(self) -> None:
        self._check_shrink()
        self._let_receives_end()
        for rank in self.slots.left_out():
            self.slots.mask(rank, False)

    def _let_receives_end(self) -> None:
        """An asynchronous one knows nothing of the post of a rank that it began without."""
        self._worker.drain()

    def query_masks(self, status: Any) -> None:
        self._check_shrink()
        status = validate.tensor("mask_status", status, shape=[self._size], dtypes=(torch.int32,))
        status.zero_()
        status[self.slots.left_out()] = 1

    def _check_shrink(self) -> None:
        validate.require(
            self._shrink,
            f"enable_shrink is False, want Buffer(enable_shrink=True), on rank {self._rank}",
        )

    def _begin(self, kind: int) -> int:
        if self.slots.moves_alone:
            self._worker.drain()
        self.engaged = True
        self.numbers[kind] += 1
        return self.numbers[kind]

    def _settle(self, kind: int, number: int) -> None:
        """What was sent two calls ago must have been received here: this call uses its place."""
        unread = self._unread.pop((kind, number % 2), None)
        if unread is None:
            return
        self._worker.drain()
        earlier, reference = unread
        hook = reference()
        if hook is None:  # nobody can call it any more
            self.slots.skip(kind, earlier)
        elif not hook.is_over:
            self._unread[kind, number % 2] = unread
            raise _Unread(
                f"the hook of call {earlier} was not called yet, want it called before call "
                f"{number}: there are two buffers"
            )

    def _end(
        self, kind: int, number: int, receive: Callable[[], None], completion: Completion
    ) -> tuple[EventOverlap, RecvHook | None]:
        """Receive now, on the Buffer's thread, or when the hook is called."""
        way = None
        if isinstance(self.slots, ExchangedSlots):
            travel: Callable[[], None] = partial(self.slots.travel, kind, number)
            if completion.return_recv_hook:
                way = self._worker.submit(travel)
                travel = way.current_stream_wait
            receive = partial(_one_by_one, travel, receive)
        if completion is AT_ONCE or not completion.is_later:
            if self._worker.pending is not None:
                self._worker.drain()
            self._receive(kind, number, receive)
            return EventOverlap(), None
        hook = RecvHook(partial(self._receive, kind, number, receive), way)
        self._unread[kind, number % 2] = number, weakref.ref(hook)
        if completion.return_recv_hook:
            return EventOverlap(None), hook
        return EventOverlap(RecvEvent(self._worker.submit(hook.on_thread), hook)), hook

    def _receive(self, kind: int, number: int, receive: Callable[[], None]) -> None:
        try:
            receive()
        except BaseException as error:
            if kind == DISPATCH:
                self._results.release(number)
            if isinstance(error, Stray):
                error = self._stray(error, STAGE_OF[kind])
            if raised_on_all_ranks(error):
                self.engaged = False
            else:
                self._failure.give_up(error)
            raise error

    def _differs(self, stage: str, rank: int, theirs: int | np.ndarray) -> None:
        """A rank has gone on to another call than this. Neither call can be undone: each rank waits
        for words of its own call, and would take the other's words for those.
        """
        stage = stage.split(" (")[0]
        other = STAGES.index(STAGE_OF[theirs]) if isinstance(theirs, int) else stage_in(theirs)
        mine = self._rank, STAGES.index(stage)
        error = differ(stage, "stage", mine, (rank, other), on_all_ranks=False)
        self._failure.give_up(error)
        raise error

    def _stray(self, stray: Stray, stage: str) -> PeerError:
        what = f"{stage}: {stray}, on rank {self._rank}"
        return PeerError(what, ranks=(stray.rank,), stage=stage)

    def _fail(self, kind: int, number: int, error: Exception) -> Exception:
        """Tell the others, and give back what to raise here."""
        stage = STAGE_OF[kind]
        if kind == DISPATCH:
            self._results.release(number)
        unread = isinstance(error, _Unread)
        named = self._agreement.named(stage, ValueError(*error.args) if unread else error)
        if self.slots.travels:
            self._take_back(kind, number, None)
            self.engaged = False  # from here on the agreement is
            self._agreement.meet(stage, named)  # where the other ranks are; it raises
        self.slots.fail(kind, number, named, unread)
        self.engaged = False
        return named

    def _ended(self, kind: int, number: int, error: Exception) -> Exception:
        """What to raise here, of which the others know, or hear now."""
        if not (isinstance(error, (PeerError, CallMismatch)) or raised_on_all_ranks(error)):
            return self._fail(kind, number, error)
        self._take_back(kind, number, error)
        return error

    def _take_back(self, kind: int, number: int, error: Exception | None) -> None:
        """Where ranks meet, a call that raises there was made by none of them: undo its number."""
        if error is not None:
            self.engaged = not raised_on_all_ranks(error)
        if self.slots.travels:
            self.slots.skip(kind, number)
            self.numbers[kind] = number - 1
            if kind == DISPATCH:
                self._results.release(number)


def _one_by_one(travel: Callable[[], None], receive: Callable[[], None]) -> None:
    with torch.inference_mode():  # results may have been made in it, which writing to them needs
        travel()
        receive()


def _open_exchange(
    engine: Engine,
    kernels: Any,
    shrink: bool,
    stage: str,
    connect_all: Callable[[], Communicator],
) -> SharedSlots | ExchangedSlots:
    """The low-latency mode's exchange, beside an engine. All ranks together; where they share no
    memory it has connections of its own.
    """
    transport = engine.transport
    if transport.node is not None:
        return SharedSlots(transport.node, kernels, shrink, stage, engine.statistics)
    if shrink:
        raise ValueError(
            f"enable_shrink is True on transport {transport.name!r}, want ranks that share memory "
            "(direct or ring): nobody can be left out of a collective"
        )
    return ExchangedSlots(transport, kernels, connect_all(), engine.agreement, engine.statistics)
