"""Balance within each node: experts in topk_idx become slots, as `spec.balance` says.

Done once, where a call begins. Ranks tell each other how many pairs each expert gets from them, and
each finds the same assignment by itself. From there on a call knows slots only: every rank has one
for each expert of its node, whose weights it can read where they lie (`engine.stacks`).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.agreement import Agreement, Call, Terms
from tokenyard.engine.mismatch import STAGES
from tokenyard.engine.statistics import COMPILED, GENERAL, Statistics
from tokenyard.runtime import recorder
from tokenyard.topology import Placement
from tokenyard.transports import Transport
from tokenyard.wire import balance as of
from tokenyard.wire import call as at
from tokenyard.wire import int64s
from tokenyard.wire.verdicts import BAD, LOW

if TYPE_CHECKING:
    from tokenyard.engine.meeting import Meeting
    from tokenyard.engine.plans import Plan, Plans

STAGE = "balance"


@contextmanager
def _among_all() -> Iterator[None]:
    """Where ranks meet: of what is raised here all have heard, and of nothing else."""
    try:
        yield
    except Exception as error:
        error.all_know = True  # type: ignore[attr-defined]  # see `Core.reject`
        raise


class _Slots(NamedTuple):
    """What follows from where experts live."""

    placement: Placement  # of the slots
    experts: list[list[int]]  # of each rank's slots
    owners_E: np.ndarray
    slots_RE: np.ndarray  # the slot of each expert on each rank, -1 on other nodes
    runs_3N: np.ndarray  # memory for what is found
    first_E: np.ndarray


class Balance:
    def __init__(
        self,
        kernels: Any,
        transport: Transport,
        agreement: Agreement,
        node_of_rank: Sequence[int],
        slack: float,
        statistics: Statistics,
    ) -> None:
        """`kernels` are a set for ranks that share memory."""
        self._kernels, self._transport, self._agreement = kernels, transport, agreement
        self._rank, self._size = transport.rank, transport.size
        self._nodes_R = np.array(node_of_rank, np.int64)
        self.slack, self._millionths = slack, round(slack * of.MILLION)
        self._slots_of = lru_cache(maxsize=16)(self._find_slots)
        self._plan_of = lru_cache(maxsize=16)(self._new_plan)
        self._meeting: Meeting | None = None
        self._plans: Plans | None = None
        self._statistics = statistics
        self._last = np.zeros(of.NUM_FIGURES + self._size, np.int64)  # figures of the last call
        self._totals = np.zeros(of.NUM_FIGURES, np.int64)  # of all calls
        self._bytes = 0  # of weights that this rank has borrowed
        self._nothing_R = np.zeros(self._size, np.int64)

    def compile(self, meeting: Meeting, plans: Plans) -> None:
        """From now on make compiled calls: all ranks share memory."""
        self._meeting, self._plans = meeting, plans

    def close(self) -> None:
        """Drop what holds this object in turn."""
        del self._slots_of, self._plan_of, self._meeting, self._plans

    def placement(self, owners: Placement) -> Placement:
        """Where the slots are."""
        return self._slots_of(owners).placement

    def experts(self, owners: Placement) -> list[int]:
        """The experts of this rank's slots."""
        return list(self._slots_of(owners).experts[self._rank])

    def choose(self, topk_idx_TK: Tensor, owners: Placement, tag: int) -> Tensor:
        """[T, K]: the slot of each pair of a contiguous tensor. All ranks together. Raises
        ValueError, before others have heard of this rank, if there is no such expert.
        """
        begin = time.monotonic_ns()
        chosen_TK = torch.empty(topk_idx_TK.shape, dtype=torch.int64, device="cpu")
        call, way = self._at_once, COMPILED
        if self._meeting is None:
            call, way = self._step_by_step, GENERAL
        bad = call(topk_idx_TK, chosen_TK, owners, tag)
        if bad >= 0:
            raise validate.bad_expert(topk_idx_TK, bad, owners.num_experts)
        borrowed_R = self._last[of.NUM_FIGURES :]
        self._statistics.count(STAGE, begin, self._nothing_R, borrowed_R, 0, way)
        self._totals += self._last[: of.NUM_FIGURES]
        active = recorder.active
        if active is not None:
            where = self._agreement.buffer_id, self._agreement.clocks_R
            track = active.track(self._statistics, *where)
            track.call(STAGE, begin, self._agreement.number)
        return chosen_TK

    def read(self, expert_bytes: int) -> None:
        """This rank reads weights of so many bytes an expert, of the last call's experts."""
        self._bytes += int(self._last[of.EXPERTS]) * expert_bytes

    def figures(self) -> dict[str, Any] | None:
        """What this has done, see `Buffer.stats`; None before rows have come."""
        total, before, after, rows, experts = self._totals.tolist()
        if not total:
            return None
        mean = total / int((self._nodes_R == self._nodes_R[self._rank]).sum())
        return {
            "busiest_before": before / mean,
            "busiest_after": after / mean,
            "borrowed_rows": rows,
            "borrowed_experts": experts,
            "borrowed_bytes": self._bytes,
        }

    def reset(self) -> None:
        """Count from 0 again."""
        self._totals[:], self._bytes = 0, 0

    def _at_once(self, topk_idx_TK: Tensor, chosen_TK: Tensor, owners: Placement, tag: int) -> int:
        """The first pair that is no expert, or -1."""
        plan, beside = self._plan_of(owners, tag)
        beside[of.IDS], beside[of.NUM_PAIRS] = topk_idx_TK.data_ptr(), topk_idx_TK.numel()
        beside[of.OUT], table = chosen_TK.data_ptr(), plan.table
        table[at.PHASE], table[at.PART], table[at.NUMBER] = at.START, 0, self._agreement.number
        assert self._meeting is not None
        with _among_all():
            if verdict := self._meeting.enter(plan, STAGE):
                if verdict >> 32 != BAD:
                    self._meeting.refuse(verdict, plan, STAGE)
                return verdict & LOW
        return -1

    def _step_by_step(
        self, topk_idx_TK: Tensor, chosen_TK: Tensor, owners: Placement, tag: int
    ) -> int:
        slots, num_experts = self._slots_of(owners), owners.num_experts
        ids_P = topk_idx_TK.numpy().reshape(-1)
        told_RE = np.empty((self._size, num_experts), np.int64)
        bad: int = self._kernels.count_pairs(ids_P, told_RE[0])
        if bad >= 0:
            return bad
        told_RE[1:] = told_RE[0]
        call = Call(stage=STAGES.index(STAGE), num_experts=num_experts, tag=tag)
        with _among_all():
            if self._transport.agrees_by_nodes:  # whose answers are not by rank
                self._agreement.meet(STAGE, Terms(call))
                counts_RE = self._transport.exchange(told_RE, STAGE)
            else:
                counts_RE = self._agreement.meet(STAGE, Terms(call, payload=told_RE)).payload
        counts_RE, found = np.ascontiguousarray(counts_RE), (slots.runs_3N, slots.first_E)
        where = slots.owners_E, self._nodes_R, self._millionths, self._rank
        self._kernels.assign(counts_RE, *where, *found, self._last)
        given = ids_P, counts_RE, slots.owners_E, self._rank, *found, slots.slots_RE
        self._kernels.take_slots(*given, chosen_TK.numpy().reshape(-1))
        return -1

    def _new_plan(self, owners: Placement, tag: int) -> tuple[Plan, array[int]]:
        assert self._plans is not None
        slots, beside = self._slots_of(owners), int64s.new(of.NUM_WORDS)
        arrays = slots.owners_E, self._nodes_R, slots.slots_RE, slots.runs_3N, slots.first_E
        addresses = [one.ctypes.data for one in (*arrays, self._last)]
        beside[of.SLACK] = self._millionths
        beside[of.OWNERS :] = array("q", addresses)
        plan = self._plans.new_balance(STAGE, owners, tag, beside)
        plan.keep(slots)
        return plan, beside

    def _find_slots(self, owners: Placement) -> _Slots:
        nodes, held = self._nodes_R.tolist(), owners.experts_of_rank
        experts = [
            [e for rank, own in enumerate(held) if nodes[rank] == home for e in own]
            for home in nodes
        ]
        size, num_experts = self._size, owners.num_experts
        slots_RE = np.full((size, num_experts), -1, np.int64)
        begin = 0
        for rank, row in enumerate(experts):
            slots_RE[rank, row] = np.arange(begin, begin + len(row))
            begin += len(row)
        ranks = np.repeat(np.arange(size, dtype=np.int32), list(map(len, experts)))
        return _Slots(
            Placement(torch.from_numpy(ranks), size),
            experts,
            owners.rank_of_expert.numpy().astype(np.int64),
            slots_RE,
            np.empty((3, num_experts + 2 * size), np.int64),
            np.empty(num_experts, np.int64),
        )


def shared_out(
    loads_SR: np.ndarray, nodes_R: np.ndarray, slack: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """[S]: the pairs of the busiest rank with a balance, given those by owner; and how many are
    borrowed. Who has more pairs than a rank may have keeps exactly so many.

    >>> loads, nodes = np.array([[9, 1, 5, 5], [2, 2, 0, 4]]), np.array([0, 0, 1, 1])
    >>> busiest, borrowed = shared_out(loads, nodes)
    >>> busiest.tolist(), borrowed.tolist()
    ([5, 2], [4, 2])
    """
    near_RR = nodes_R[:, None] == nodes_R[None]
    slackened = (loads_SR @ near_RR) * (of.MILLION + round(slack * of.MILLION))
    most_SR = -(-slackened // (near_RR.sum(0) * of.MILLION))
    return np.minimum(loads_SR, most_SR).max(1), np.maximum(loads_SR - most_SR, 0).sum(1)
