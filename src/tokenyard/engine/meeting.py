"""How compiled calls are entered: what their verdicts ask for, and what ranks then raise."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from tokenyard import validate
from tokenyard.engine.core import Core
from tokenyard.engine.ledger import WrittenLedger
from tokenyard.engine.plans import Plan
from tokenyard.engine.statistics import COMPILED
from tokenyard.errors import SharedMemoryError
from tokenyard.runtime.completion import Completion
from tokenyard.runtime.events import EventHandle, EventOverlap
from tokenyard.runtime.threads import in_threads, num_threads
from tokenyard.shm import shared_rows
from tokenyard.wire import call as at
from tokenyard.wire import message as say
from tokenyard.wire.signals import MAIL
from tokenyard.wire.verdicts import BAD, DIFFERS, LATE, LOW, MAP, NO_MEMORY, SHORT, STRAY


class Meeting:
    def __init__(self, core: Core) -> None:
        node = core.transport.node
        assert node is not None
        self.node, self._agreement, self._rank = node, core.agreement, core.rank
        self._core, self._worker = core, core.worker

    def enter(self, plan: Plan, stage: str) -> int:
        """Make a call until it is over, or until it needs what only its caller can give: 0, or the
        verdict that says so. If others rely on this rank then, it is `engaged`.
        """
        agreement, call = self._agreement, plan.call
        agreement.engaged = True
        while verdict := call():
            if not self.answers(verdict, plan, stage):
                agreement.engaged = plan.table[at.PHASE] != at.START
                return verdict
        agreement.number += 1
        return 0

    def end(self, plan: Plan, stage: str) -> int:
        """Go on, as `enter`, with a call in which ranks have met: also on the Buffer's thread."""
        while verdict := plan.call():
            if not self.answers(verdict, plan, stage):
                return verdict
        return 0

    def answers(self, verdict: int, plan: Plan, stage: str) -> bool:
        """Whether this can do what a verdict asks for, and has done so."""
        what, which = verdict >> 32, verdict & LOW
        if what == LATE:
            self.node.mailbox.wait_for(which, f"{stage} (notify)" if which == MAIL else stage)
        elif what == MAP:
            theirs = self.node.mailbox.last_messages()[which].tolist()
            for first in range(say.SEGMENTS, plan.segments_end, say.SEGMENT_WORDS):
                told = theirs[first : first + say.SEGMENT_BEGIN]
                self.node.attached.make_known(which, told, stage)
        elif what == STRAY:
            raise self.node.liveness.stray(which, stage)
        else:
            return False
        return True

    def refuse(
        self,
        verdict: int,
        plan: Plan,
        stage: str,
        topk_idx: Tensor | None = None,
        error: SharedMemoryError | None = None,
    ) -> NoReturn:
        """Raise what a call has met that cannot be made. `error` says why this rank has no memory,
        if it has none.
        """
        what, which, agreement = verdict >> 32, verdict & LOW, self._agreement
        if what == BAD:
            assert topk_idx is not None
            agreement.reject(
                stage, validate.bad_expert(topk_idx, which, plan.table[at.NUM_EXPERTS])
            )
        messages = self.node.mailbox.last_messages()
        if what == DIFFERS:
            own = plan.told._replace(handle=plan.table[at.HANDLE])
            agreement.compare(stage, own, messages)
        agreement.number += 1
        if what == NO_MEMORY:
            told = *range(say.SEGMENTS, plan.segments_end, say.SEGMENT_WORDS), say.ROOM
            without, plan.head[say.ROOM] = messages[:, list(told)], 0
            shared_rows.check(without, [error], stage, self._rank)
        assert what == SHORT
        mine, short = plan.table[at.WORST], None
        rows = plan.table[at.NUM_ROWS]
        if 0 < mine < rows:
            short = agreement.named(stage, validate.too_few_rows(mine, rows))
        agreement.confirm(stage, short)
        raise AssertionError("one rank has refused")

    def begin(self, plan: Plan, completion: Completion, num_items: int, moved: int) -> bool:
        """Write the words with which every call begins. Whether it hands over its rows."""
        if not completion.async_finish and self._worker.pending is not None:
            self._worker.drain()
        hands_over = completion.async_finish or num_threads(num_items, moved) > 1
        table = plan.table
        table[at.PHASE], table[at.PART], table[at.HANDS_OVER] = at.START, 0, hands_over
        table[at.NUMBER] = self._agreement.number
        table[at.COUNTERS] = 0 if hands_over else plan.counters
        return hands_over

    def move(
        self,
        plan: Plan,
        stage: str,
        completion: Completion,
        pending: EventHandle | None,
        part: Any,
        num_items: int,
        num_bytes: int,
        held: Any,
    ) -> EventOverlap:
        """Move rows, and end the call: now, or on the Buffer's thread. `held` lives until all ranks
        have written, even if nobody wants the result any more.
        """
        self._agreement.number += 1

        def work(held: Any = held) -> None:
            in_threads(part, num_items, num_bytes)
            plan.table[at.PHASE] = at.MOVED
            verdict = self.end(plan, stage)
            assert not verdict

        return self._core.finish(work, completion, pending, (), stage)

    def count(
        self,
        stage: str,
        begin: int,
        ledger: WrittenLedger,
        plan: Plan,
        back: bool = False,
    ) -> None:
        """Count a call that was handed over."""
        sent, came = ledger.sent_RR[self._rank], ledger.sent_RR[:, self._rank]
        if back:
            sent, came = came, sent
        self._core.statistics.count(stage, begin, sent, came, sum(plan.widths), COMPILED)
