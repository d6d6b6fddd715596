"""Low-latency calls where ranks share memory: compiled calls in slots, over plans that stay.

A call fills the table of its plan and enters it (`kernels.numba.call.slots`). With a hook, or on
the Buffer's thread, it is entered twice: to send, and later to receive. `places` has the memory.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.agreement import raise_difference
from tokenyard.engine.engine import Engine
from tokenyard.engine.failure import raised_on_all_ranks
from tokenyard.errors import TEXT_WORDS, PeerError, SharedMemoryError, error_to_words, rejected
from tokenyard.kernels import Kernels
from tokenyard.low_latency import logfmt
from tokenyard.low_latency.engine import Arrived, LowLatency
from tokenyard.low_latency.handle import COMBINE, DISPATCH, LowLatencyHandle
from tokenyard.low_latency.inputs import Rows, Tokens, repeated_pair, unsent_pair
from tokenyard.low_latency.places import Masks, Place, SlotPlan, control_bytes
from tokenyard.low_latency.shape import SlotShape
from tokenyard.runtime.completion import AT_ONCE, Completion, RecvHook
from tokenyard.runtime.events import EventOverlap
from tokenyard.shm.control import Control, ControlLayout
from tokenyard.shm.node import BOX
from tokenyard.shm.segment import Segment
from tokenyard.wire import call as at
from tokenyard.wire import message as say
from tokenyard.wire import verdicts
from tokenyard.wire.fp8 import NO_CAST
from tokenyard.wire.signals import MAIL, READ

Given = Tokens | Rows

_LEAVING = 5.0  # seconds that a Buffer waits, when it is closed, for others to map its memory
_IDS, _WEIGHTS = at.SOURCES + 2, at.SOURCES + 3
_ROWS = say.SEGMENTS + say.SEGMENT_WORDS  # a combine tells of its rows behind its block


class SharedSlots(LowLatency):
    def __init__(self, engine: Engine, kernels: Kernels, shrink: bool, num_bytes: int) -> None:
        """All ranks together."""
        super().__init__(engine, kernels, shrink, num_bytes)
        node = engine.transport.node
        assert node is not None
        self._node, self._failure = node, engine.failure
        self._calls: Any = kernels
        node.liveness.shrinks = shrink
        size, layout = node.size, ControlLayout(node.size, BOX)
        shared = node.share_arrays(control_bytes(size), "Buffer (low latency)", "slots")
        ends = [(i + 1) * layout.num_bytes for i in range(4)]
        self.masks = Masks(size, node.rank, [one[ends[-1] :].view(np.int64) for one in shared])
        # Two of each kind, which its calls use in turn.
        self.places = [
            Place(i // 2, node, [Control(one[: ends[0]], layout) for one in parts], self.masks)
            for i, parts in enumerate([[one[end - ends[0] :] for one in shared] for end in ends])
        ]

    def forget(self) -> None:
        super().forget()
        for place in self.places:
            place.plans.clear()

    def left_out(self) -> list[int]:
        return self.masks.left_out

    def mask(self, rank: int, masked: bool) -> None:
        self.masks.set(rank, masked)

    def empty_rows(self, shape: SlotShape, dtype: torch.dtype) -> Tensor:
        rows = self._node.pool.rows(shape.num_local * shape.num_slots, shape.hidden, dtype)
        return rows.view(shape.x_shape)

    def is_shared(self, y: Tensor) -> bool:
        return not y.numel() or self._node.pool.find(y.data_ptr(), y.nbytes) is not None

    def dispatch(
        self, completion: Completion, *asked: Any
    ) -> tuple[Arrived, LowLatencyHandle, EventOverlap, RecvHook | None]:
        place, number = self._begin(DISPATCH)
        try:
            self._settle(place, completion)
            given = self.tokens(completion, *asked)
            x, topk_idx, shape, totals, _ = given
            plan = place.plans.get(shape) or self._new_plan(place, shape, shape.dtype, shape)
            handle = LowLatencyHandle(shape, x.shape[0], self._buffer_id, number)
            out, table = plan.result(), plan.table
            table[at.SOURCES], table[_IDS] = x.data_ptr(), topk_idx.data_ptr()
            table[at.RANGES], table[at.PAIRS_SENT], table[at.SRC_INFO] = handle.addresses
            table[at.RESULT], table[at.ENDS] = out.x.data_ptr(), out.counts.data_ptr()
            table[at.RESULT_SCALES] = 0 if out.scales is None else out.scales.data_ptr()
            table[at.TOTALS] = 0 if totals is None else totals.data_ptr()
            table[at.NUM_TOKENS] = handle.num_tokens
            if place.offered is not plan:
                table[at.BLOCK] = self._offer(place, plan, plan.least).address
            self._send(place, plan, number, -1, given)
        except Exception as error:
            raise self._ended(place, error) from None
        self.engaged = False
        if completion is AT_ONCE or not completion.is_later:
            return out, handle, EventOverlap(), None
        hook = RecvHook(partial(self._receive, place, plan, given, (out, handle.memory)))
        handle.hook, place.unread = hook, weakref.ref(hook)
        return out, handle, *self.later(hook, completion)

    def combine(
        self, completion: Completion, *asked: Any
    ) -> tuple[Tensor, EventOverlap, RecvHook | None]:
        place, number = self._begin(COMBINE)
        try:
            self._settle(place, completion)
            given = self.rows(completion, *asked)
            y, topk_idx, weights, known, zero_copy, out, _ = given
            if completion is not AT_ONCE:  # the user may write to his own once this has returned
                given = given._replace(weights=weights.clone())
                weights = given.weights
            key = known.shape, y.dtype
            plan = place.plans.get(key) or self._new_plan(place, known.shape, y.dtype, key)
            table = plan.table
            if out is not None and out.dtype is y.dtype:
                sums = out
            else:
                sums = plan.empty_sums(known.num_tokens, self._node.pool)
            table[at.SOURCES], table[_IDS] = y.data_ptr(), topk_idx.data_ptr()
            table[_WEIGHTS], table[at.OUTS] = weights.data_ptr(), sums.data_ptr()
            table[at.RANGES], table[at.PAIRS_SENT], _ = known.addresses
            table[at.NUM_TOKENS] = known.num_tokens
            if zero_copy or place.offers_lent or place.offered is not plan:
                self._offer_rows(place, plan, given)
            self._send(place, plan, number, known.number, given)
        except Exception as error:
            raise self._ended(place, error) from None
        place.lent = y if zero_copy else None  # all have read those of the call before
        self.engaged, known.lent = False, ()
        then = None if out is None or out is sums else partial(logfmt.round_sums, sums, out)
        out = sums if out is None else out
        if completion is AT_ONCE or not completion.is_later:
            if then is not None:
                then()
            return out, EventOverlap(), None
        hook = RecvHook(partial(self._receive, place, plan, given, sums, then))
        place.unread = weakref.ref(hook)
        return out, *self.later(hook, completion)

    def refuse(self, kind: int, error: Exception) -> NoReturn:
        place, _ = self._begin(kind)
        self._settle(place, AT_ONCE)
        raise self._ended(place, error) from None

    def wait_to_leave(self) -> None:
        deadline, skip = time.monotonic() + _LEAVING, self.masks.address
        for place in self.places:
            if place.is_posted:  # nobody will receive it here
                place.mailbox.signal(READ)
            while time.monotonic() < deadline:
                late = set(place.mailbox.late_ranks(READ, skip))
                if late <= self._node.liveness.gone():
                    break
                time.sleep(1e-3)

    def _begin(self, kind: int) -> tuple[Place, int]:
        self.engaged = True
        self.numbers[kind] = number = self.numbers[kind] + 1
        return self.places[2 * kind + number % 2], number

    def _settle(self, place: Place, completion: Completion) -> None:
        """Receive what was sent two calls ago, whose place this call takes, and end what the
        Buffer's thread does if this call does not go on there.
        """
        if self._worker.pending is not None and (place.unread or not completion.is_later):
            self._worker.drain()
        if place.unread is not None:
            hook, place.unread = place.unread(), None
            if hook is not None:
                hook.on_thread()
            elif place.is_posted:  # nobody can call it any more
                place.mailbox.signal(READ)

    def _new_plan(self, place: Place, shape: SlotShape, dtype: torch.dtype, key: Any) -> SlotPlan:
        plan = place.plans[key] = SlotPlan(place, shape, self._agreement.buffer_id, dtype)
        load = self._statistics.load(shape.placement)
        plan.count(self._statistics.address(place.stage), load)
        if place.kind == DISPATCH:
            like = torch.bfloat16 if shape.cast == NO_CAST else dtype
            plan.call = self._calls.dispatch_slots(like, plan.address)
        else:
            plan.call = self._calls.combine_slots(dtype, plan.address)
        return plan

    def _offer(self, place: Place, plan: SlotPlan, num_bytes: int) -> Segment:
        """A block for what a call sends: the one that its last call offered, if that will do. A
        block that another one replaces may be lent to somebody else at once, so all must have read
        it before.
        """
        if place.block is None or not place.fits(plan, num_bytes):
            self._wait(place, None, READ)
        elif place.offered is plan:
            return place.block
        return place.offer(plan, num_bytes)

    def _offer_rows(self, place: Place, plan: SlotPlan, given: Rows, num_rows: int = 0) -> None:
        """Offer the rows of a combine where they lie, or room to which the call copies them."""
        table, head, begin = plan.table, plan.head, plan.least
        segment = block = self._offer(place, plan, begin + num_rows * plan.row_bytes)
        place.offers_lent = given.zero_copy
        table[at.BLOCK], table[at.ROWS_AT] = block.address, block.address + begin
        table[at.ROOM] = (block.size - begin) // plan.row_bytes
        if given.zero_copy and given.y.numel():
            address = given.y.data_ptr()
            found = self._node.pool.find(address, given.y.nbytes)
            assert found is not None, "zero_copy was checked"
            segment = found
            begin, table[at.ROWS_AT] = address - segment.address, 0
            place.name(segment)
        head[_ROWS], head[_ROWS + 1], head[_ROWS + 2] = segment.told
        head[_ROWS + say.SEGMENT_BEGIN] = begin

    def _send(self, place: Place, plan: SlotPlan, number: int, handle: int, given: Given) -> None:
        """Make a call, or its first half if it is received later."""
        table, completion = plan.table, given.completion
        table[at.PHASE], table[at.LATER] = at.START, completion is not AT_ONCE
        table[at.NUMBER], table[at.HANDLE], table[at.AWAITS] = number, handle, place.is_new
        plan.head[say.HOW] = say.READY
        if completion is not AT_ONCE and completion.is_later:
            plan.head[say.HOW] = say.LATER
            self._enter(place, plan, given)
            return
        self._enter(place, plan, given)
        if completion.waits is not None:
            self._time_arrivals(place, plan, completion.waits)
            self._enter(place, plan, given)
        if place.is_new and not (place.mailbox.last_messages()[:, say.HOW] & say.LATER).any():
            place.settle_names()

    def _enter(self, place: Place, plan: SlotPlan, given: Given) -> None:
        """Make a call, or go on with it, until it is over or its message is sent."""
        while verdict := plan.call():
            what, which = verdict >> 32, verdict & verdicts.LOW
            if what == verdicts.POSTED:
                return
            if what == verdicts.LATE:
                self._wait(place, plan, which)
            elif what == verdicts.MAP:
                self._map(place, which)
            elif what == verdicts.MASKED and self._shrink:
                self.mask(which, True)
            elif what == verdicts.MORE_ROOM:  # twice what is needed, so that it is asked for seldom
                assert isinstance(given, Rows)
                self._offer_rows(place, plan, given, min(2 * which, plan.most_rows))
            elif what == verdicts.DIFFERS:
                self._differ(place, plan, which)
            elif what == verdicts.TWICE:
                raise repeated_pair(given.topk_idx, which)
            elif what == verdicts.BAD and place.kind == COMBINE:
                raise unsent_pair(given.topk_idx, which)
            elif what == verdicts.BAD:
                raise validate.bad_expert(given.topk_idx, which, plan.table[at.NUM_EXPERTS])
            else:
                raise self._node.liveness.stray(which, place.stage)

    def _receive(
        self,
        place: Place,
        plan: SlotPlan,
        given: Given,
        held: Any,
        then: Callable[[], None] | None = None,
    ) -> None:
        """The second half of a call. `held` keeps the memory that its table has addresses of."""
        try:
            plan.table[at.BEGAN] = time.monotonic_ns()
            if given.completion.waits is not None:
                self._time_arrivals(place, plan, given.completion.waits)
            self._enter(place, plan, given)
            if then is not None:
                then()
        except BaseException as error:
            if not raised_on_all_ranks(error):
                self._failure.give_up(error)
            raise
        finally:
            place.unread = None

    def _ended(self, place: Place, error: Exception) -> Exception:
        """What to raise here, of which the others know, or hear now."""
        if raised_on_all_ranks(error):
            self.engaged = False
            return error
        if isinstance(error, PeerError) or place.is_posted:
            return error
        named = self._agreement.named(place.stage, error)
        self._wait(place, None, READ)
        message = np.zeros((self._size, say.PAYLOAD + TEXT_WORDS), np.int64)
        message[:, say.FAILED], message[:, say.PAYLOAD :] = 1, error_to_words(named)
        place.mailbox.send(message)
        place.mailbox.signal(READ)
        if isinstance(named, SharedMemoryError):
            named.on_all_ranks = True
        self.engaged = False
        return named

    def _map(self, place: Place, rank: int) -> None:
        """Map what a rank has told of: its block, and the rows of a combine."""
        told = place.mailbox.last_messages()[rank].tolist()
        for first in (say.SEGMENTS, _ROWS)[: 1 + place.kind]:
            wrong: PeerError | None = None
            try:
                if not place.map(rank, told[first : first + say.SEGMENT_BEGIN]):
                    wrong = self._node.liveness.stray(rank, place.stage)
            except PeerError as error:
                wrong = error
            if wrong is not None:
                if not self._shrink:
                    raise wrong
                self.mask(rank, True)  # dead, or it leaves this rank out, and told of other memory
                return

    def _differ(self, place: Place, plan: SlotPlan, which: int) -> NoReturn:
        """Raise what another rank has told: that it failed, or that it makes another call."""
        messages = place.mailbox.last_messages()
        place.mailbox.signal(READ)
        messages[self.left_out()] = messages[self._rank]
        failed = np.flatnonzero(messages[:, say.FAILED])
        if len(failed):
            words = messages[failed[0], say.PAYLOAD : say.PAYLOAD + TEXT_WORDS]
            raise rejected(int(failed[0]), words, place.stage)
        table = plan.table
        mine = plan.told._replace(number=table[at.NUMBER], handle=table[at.HANDLE])
        raise_difference(place.stage, self._rank, mine, messages)
        raise self._node.liveness.stray(which, place.stage)

    def _wait(
        self,
        place: Place,
        plan: SlotPlan | None,
        kind: int,
        note: Callable[[list[int]], None] | None = None,
    ) -> None:
        """Wait until all others have signalled as often as this rank. Ranks that stop are blamed,
        or left out where ranks may shrink. `note` hears who is late.
        """
        is_end = plan is not None and plan.table[at.PHASE] == at.READ
        skip = plan.table[at.LACKS] if plan is not None and is_end else self.masks.address
        last, begin, liveness = self._rank, time.monotonic_ns(), self._node.liveness

        def late() -> list[int]:
            return place.mailbox.late_ranks(kind, skip)

        def step() -> int:
            nonlocal last
            found = late()
            if note is not None:
                note(found)
            last = found[-1] if found else last
            return len(found)

        while stopped := liveness.who_stops(step, late, place.stage, self.left_out()):
            if not self._shrink:
                raise liveness.blame(stopped, place.stage)
            if plan is not None and is_end:  # results say already whose rows they have
                plan.table[at.AWAITS] = 0
                return
            for rank in stopped.ranks:
                self.mask(rank, True)
        if last != self._rank:
            self._node.mailbox.waits.note(last, begin)

    def _time_arrivals(self, place: Place, plan: SlotPlan, waits: Tensor) -> None:
        """Add to each rank's place the nanoseconds until its message was there."""
        begin, pending = time.perf_counter_ns(), set(range(self._size)) - {self._rank}
        spent = waits.numpy()

        def note(late: list[int]) -> None:
            for rank in pending.difference(late):
                spent[rank] += time.perf_counter_ns() - begin
                pending.discard(rank)

        self._wait(place, plan, MAIL, note)
