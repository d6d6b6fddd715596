"""The ledgers that compiled calls write and read: numbers in memory, and lists when asked for."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tokenyard.kernels.base import RowKernels
from tokenyard.results import Ledger
from tokenyard.topology import Topology
from tokenyard.transports.hierarchical.route import KnownMarks
from tokenyard.types import Flow, Route
from tokenyard.wire import int64s
from tokenyard.wire.nodes_table import CAME_ROWS, CAME_TOKENS


class WrittenLedger:
    """The ledger of a dispatch where all ranks share memory.

    Its memory holds, in int64, the rows from each rank to each, the tokens of each rank, and the
    rows of each rank's result; then, in int32, copy_start, copy_rank and copy_slot of `Route`, and
    the token of each row of the result.
    """

    num_rows = num_copies = 0  # of the result, and sent: known once all is written

    def __init__(
        self, rank: int, num_ranks: int, num_tokens: int, room: int, src_room: int
    ) -> None:
        """Make room for `room` rows that are sent, and `src_room` rows of the result."""
        words = num_ranks * (num_ranks + 2) + (num_tokens + 2 * room + src_room + 2) // 2
        self.memory = int64s.new(words)
        self.rank, self.num_ranks, self.num_tokens = rank, num_ranks, num_tokens
        self.room, self.src_room = room, src_room

    @property
    def address(self) -> int:
        return int64s.address(self.memory)

    def with_room(self, src_room: int) -> WrittenLedger:
        """A copy with room for `src_room` rows of the result, which are yet to be written."""
        made = WrittenLedger(self.rank, self.num_ranks, self.num_tokens, self.room, src_room)
        same = min(len(made.memory), len(self.memory))
        made.memory[:same] = self.memory[:same]
        return made

    @classmethod
    def of(cls, known: Ledger, rank: int) -> WrittenLedger:
        """What a compiled dispatch would have written of a route that came as lists, all that later
        calls read of it. Raises ValueError if no dispatch has made such lists.
        """
        flow = known.flow
        route, rows_R, sent_RR = flow.route, flow.rows_R, flow.sent_RR
        if rows_R is None or sent_RR is None or min(flow.recv_counts) < 0:
            raise ValueError("handle has lists that no dispatch of this transport makes")
        made = cls(rank, len(flow.recv_counts), known.num_tokens, known.num_copies, 0)
        made.num_rows, made.num_copies = known.num_rows, known.num_copies
        made.sent_RR[:], made.tokens_R[:], made.rows_R[:] = sent_RR, flow.tokens_R, rows_R
        lists = route.copy_start, route.copy_rank, route.copy_slot
        for one, listed in zip(made._lists(), lists):
            one.copy_(listed)
        made.flow, made.src_idx = flow, known.src_idx
        made.is_token_in_rank = known.is_token_in_rank
        return made

    @cached_property
    def sent_RR(self) -> np.ndarray:
        size = self.num_ranks
        return np.frombuffer(self.memory, np.int64, size * size).reshape(size, size)

    @cached_property
    def tokens_R(self) -> np.ndarray:
        return self._words(self.num_ranks)

    @cached_property
    def rows_R(self) -> np.ndarray:
        return self._words(self.num_ranks + 1)

    def _words(self, row: int) -> np.ndarray:
        size = self.num_ranks
        return np.frombuffer(self.memory, np.int64, size, 8 * size * row)

    @cached_property
    def flow(self) -> Flow:
        # Copies: the memory itself is compiled code's, which makes addresses of it.
        sent_RR, tokens_R, rows_R = self.sent_RR.copy(), self.tokens_R.copy(), self.rows_R.copy()
        starts, ranks, slots, _ = (one.clone() for one in self._lists())
        # Rows by rank: a stable sort of the copies, which are by token.
        by_rank = self._token_of_copies(starts)[torch.argsort(ranks, stable=True)]
        route = Route(by_rank, tuple(sent_RR[self.rank].tolist()), starts, ranks, slots)
        flow = Flow.of(route, sent_RR[:, self.rank], tokens_R, sent_RR)
        most = max(flow.most_rows, int(rows_R.max()))
        return flow._replace(num_rows=self.num_rows, rows_R=rows_R, most_rows=most)

    @cached_property
    def is_token_in_rank(self) -> Tensor:
        starts, ranks, *_ = self._lists()
        marks = torch.zeros(self.num_tokens, self.num_ranks, dtype=torch.bool, device="cpu")
        marks[self._token_of_copies(starts).long(), ranks.long()] = True
        return marks

    @cached_property
    def src_idx(self) -> Tensor:
        return self._lists()[3]

    def _token_of_copies(self, starts: Tensor) -> Tensor:
        tokens = torch.arange(self.num_tokens, dtype=torch.int32, device="cpu")
        return torch.repeat_interleave(tokens, starts.diff())

    def _lists(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """copy_start, copy_rank, copy_slot, and the token of each row of the result."""
        begin = 8 * self.num_ranks * (self.num_ranks + 2)
        ints = torch.frombuffer(self.memory, dtype=torch.int32, offset=begin)
        ranks = self.num_tokens + 1
        slots, came = ranks + self.room, ranks + 2 * self.room
        return (
            ints[:ranks],
            ints[ranks : ranks + self.num_copies],
            ints[slots : slots + self.num_copies],
            ints[came : came + self.num_rows],
        )


class MarkedLedger:
    """The ledger of a dispatch between nodes: who gets which token, and what came from whom."""

    def __init__(
        self,
        marks_TR: np.ndarray,
        tally_FR: np.ndarray,
        bits: np.ndarray,
        src_idx: Tensor,
        rank: int,
        topology: Topology,
        kernels: RowKernels,
    ) -> None:
        """`marks_TR`, `tally_FR` and `bits` are as `KnownMarks` has them."""
        self.marks_TR, self.tally_FR, self.bits, self.src_idx = marks_TR, tally_FR, bits, src_idx
        self.num_tokens, self.num_rows = len(marks_TR), src_idx.shape[0]
        self.tokens_R = tally_FR[CAME_TOKENS]
        self._rank, self._topology, self._kernels = rank, topology, kernels

    @cached_property
    def num_copies(self) -> int:
        return int(self.marks_TR.sum())

    @cached_property
    def flow(self) -> Flow:
        topology, tokens_R = self._topology, self.tokens_R
        known = KnownMarks(self.marks_TR, self.tally_FR, self.bits, topology, self._rank)
        route = self._kernels.route(self.is_token_in_rank)
        return Flow.of(route, self.tally_FR[CAME_ROWS], tokens_R, two_level=known)

    @cached_property
    def is_token_in_rank(self) -> Tensor:
        return torch.from_numpy(self.marks_TR)
