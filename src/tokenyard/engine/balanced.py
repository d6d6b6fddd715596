"""Balance within each node: experts in topk_idx become slots, as `spec.balance` says.

Done once, where a call begins. Ranks tell each other how many pairs each expert gets from them, and
each finds the same assignment by itself. From there on a call knows slots only: every rank has one
for each expert of its node, whose weights it can read where they lie (`engine.stacks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.agreement import Agreement, Call, Terms
from tokenyard.engine.mismatch import STAGES
from tokenyard.kernels import Kernels, balancing
from tokenyard.topology import Placement
from tokenyard.transports import Transport

STAGE = "balance"


class _Slots(NamedTuple):
    """What follows from where experts live."""

    placement: Placement  # of the slots
    experts: list[list[int]]  # of each rank's slots
    owners_E: np.ndarray
    slots_RE: np.ndarray  # the slot of each expert on each rank, -1 on other nodes


class Balance:
    def __init__(
        self,
        kernels: Kernels,
        transport: Transport,
        agreement: Agreement,
        node_of_rank: Sequence[int],
        slack: float,
    ) -> None:
        self._kernels, self._transport, self._agreement = kernels, transport, agreement
        self._rank, self._size = transport.rank, transport.size
        self._nodes_R = np.array(node_of_rank, np.int64)
        self.slack, self._millionths = slack, round(slack * balancing.MILLION)
        self._slots_of = lru_cache(maxsize=16)(self._find_slots)
        self.totals = np.zeros(balancing.NUM_FIGURES + 1, np.int64)  # of all calls; their number
        self.last = np.zeros(balancing.NUM_FIGURES, np.int64)  # of the last one

    def placement(self, owners: Placement) -> Placement:
        """Where the slots are."""
        return self._slots_of(owners).placement

    def experts(self, owners: Placement) -> list[int]:
        """The experts of this rank's slots."""
        return self._slots_of(owners).experts[self._rank]

    def choose(self, topk_idx_TK: Tensor, owners: Placement, tag: int) -> Tensor:
        """[T, K]: the slot of each pair. All ranks together; bad input raises on all of them."""
        slots, num_experts = self._slots_of(owners), owners.num_experts
        ids_P = topk_idx_TK.numpy().reshape(-1)
        told_RE = np.empty((self._size, num_experts), np.int64)
        bad = self._kernels.count_pairs(ids_P, told_RE[0])
        if bad >= 0:
            raise validate.bad_expert(topk_idx_TK, bad, num_experts)
        told_RE[1:] = told_RE[0]
        call = Call(stage=STAGES.index(STAGE), num_experts=num_experts, tag=tag)
        counts_RE = self._tell(call, told_RE)
        runs_3N = np.empty((3, num_experts + 2 * self._size), np.int64)
        first_E = np.empty(num_experts, np.int64)
        where = slots.owners_E, self._nodes_R, self._millionths, self._rank
        self._kernels.assign(counts_RE, *where, runs_3N, first_E, self.last)
        self.totals[:-1] += self.last
        self.totals[-1] += 1
        chosen_TK = torch.empty(topk_idx_TK.shape, dtype=torch.int64)
        given = ids_P, counts_RE, slots.owners_E, self._rank, runs_3N, first_E, slots.slots_RE
        self._kernels.take_slots(*given, chosen_TK.numpy().reshape(-1))
        return chosen_TK

    def _tell(self, call: Call, told_RE: np.ndarray) -> np.ndarray:
        """[R, E]: the counts of all ranks, in a message of the agreement as far as they fit."""
        if not self._transport.agrees_by_nodes:
            return self._agreement.meet(STAGE, Terms(call, payload=told_RE)).payload
        self._agreement.meet(STAGE, Terms(call))
        return self._transport.exchange(told_RE, STAGE)

    def _find_slots(self, owners: Placement) -> _Slots:
        nodes, held = self._nodes_R.tolist(), owners.experts_of_rank
        experts = [
            [e for rank, own in enumerate(held) if nodes[rank] == home for e in own]
            for home in nodes
        ]
        slots_RE = np.full((self._size, owners.num_experts), -1, np.int64)
        begin = 0
        for rank, row in enumerate(experts):
            slots_RE[rank, row] = np.arange(begin, begin + len(row))
            begin += len(row)
        ranks = np.repeat(np.arange(self._size, dtype=np.int32), list(map(len, experts)))
        return _Slots(
            Placement(torch.from_numpy(ranks), self._size),
            experts,
            owners.rank_of_expert.numpy().astype(np.int64),
            slots_RE,
        )
