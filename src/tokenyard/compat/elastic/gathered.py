"""The results of all-gathers in memory that ranks share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenyard.compat.elastic.shared_block import SharedBlock, as_bytes
from tokenyard.errors import CallMismatch
from tokenyard.shm.node import SharedNode
from tokenyard.types import round_up

ALIGNED = 32  # bytes; V2 begins results at multiples of this
_STAGE = "all_gather"


class SharedResults:
    """The results of a session in every rank's memory, one after the other: rank r's part of each
    is written by rank r. Lines of a rank, by source: how many all-gathers have come from it, and
    how many sessions it has ended. Before the results lie the bytes of each all-gather, by source.
    """

    def __init__(self, node: SharedNode, num_bytes: int, num_calls: int) -> None:
        self._rank, self._size, self._num_calls = node.rank, node.size, num_calls
        self._begin = round_up(8 * node.size * num_calls, ALIGNED)
        lines = 2 * node.size
        self._block = SharedBlock(node, lines, self._begin + num_bytes, "agrs_set_config")
        self._ranks = range(node.size)
        self._calls = self._sessions = 0  # since the beginning

    def begin(self) -> None:
        """Nobody may write into results of the last session that another rank still reads."""
        ended = [self._size + rank for rank in self._ranks]
        self._block.wait(ended, self._ranks, self._sessions, "create_agrs_session")

    def end(self) -> None:
        self._sessions += 1
        self._block.signal(self._size + self._rank, self._ranks, self._sessions)

    def part(self, offset: int, num_bytes: int) -> Tensor:
        """This rank's part of the result that begins there."""
        return self._at(self._rank, offset, num_bytes)

    def gather(
        self, tensors: Sequence[Tensor], offsets: Sequence[int], slot: int
    ) -> tuple[list[Tensor], tuple[int, int, int]]:
        """The results, and what `wait` is to be given before they are read."""
        total = sum(t.nbytes for t in tensors)
        for other in self._ranks:
            for t, offset in zip(tensors, offsets):
                part = self._at(other, offset, t.nbytes)
                if t.nbytes and part.data_ptr() != t.data_ptr():
                    part.copy_(as_bytes(t))
            self._bytes(other)[self._rank, slot] = total
        self._calls += 1
        self._block.signal(self._rank, self._ranks, self._calls)
        own = self._block.memory[self._rank][self._begin :]
        results = []
        for t, offset in zip(tensors, offsets):
            everything = own[offset : offset + self._size * t.nbytes]
            results.append(everything.view(t.dtype).view(self._size, *t.shape))
        return results, (self._calls, slot, total)

    def wait(self, calls: int, slot: int, total: int) -> None:
        self._block.wait(self._ranks, self._ranks, calls, _STAGE)
        for rank, theirs in enumerate(self._bytes(self._rank)[:, slot].tolist()):
            if theirs != total:
                raise CallMismatch(
                    f"{_STAGE}: ranks differ in bytes: {total} on rank {self._rank}, {theirs} on "
                    f"rank {rank}",
                    what="bytes",
                )

    def _at(self, rank: int, offset: int, num_bytes: int) -> Tensor:
        begin = self._begin + offset + self._rank * num_bytes
        return self._block.memory[rank][begin : begin + num_bytes]

    def _bytes(self, rank: int) -> Tensor:
        """[R, calls] int64, by source."""
        words = self._block.memory[rank][: 8 * self._size * self._num_calls]
        return words.view(torch.int64).view(self._size, self._num_calls)
