"""What a transport does, and what it may stand on.

A *communicator* is the little that every engine of this field can do: an all-to-all of byte rows. A
*transport* makes the two row exchanges of expert parallelism out of whatever it has: a
communicator, memory that ranks share, or other transports. Kernels are handed to it; it never
imports them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from tokenyard.types import Route


class PackKernel(Protocol):
    """The kernels that moving rows asks for."""

    def pack(self, x_TB: Tensor, index_N: Tensor | None, out_NB: Tensor) -> Tensor: ...


class Communicator(Protocol):
    """Blocks, but never for ever: PeerDied or PeerTimeout say who did not come, and where."""

    rank: int
    size: int
    name: str

    def all_to_all(
        self,
        out_NB: Tensor,
        rows_NB: Tensor,
        out_counts: Sequence[int],
        counts: Sequence[int],
        stage: str,
    ) -> None:
        """Send counts[r] rows to each rank r, in order; out_counts[r] rows come from it."""

    def leave_word(self) -> None:
        """This rank lives, and has noticed that something is wrong: so others need not blame it."""

    def close(self) -> None: ...


class Transport(Protocol):
    rank: int
    size: int
    name: str

    def exchange(self, message_RM: Tensor, stage: str) -> Tensor:
        """Row r of an int64 message goes to rank r; row r of the answer came from it."""

    def send(
        self,
        columns: Sequence[Tensor],
        route: Route,
        recv_counts: Sequence[int],
        num_rows: int,
        stage: str,
    ) -> list[Tensor]:
        """Dispatch's exchange. Each column [T, B] of bytes arrives as [num_rows, B], by (source,
        token).

        num_rows is at least sum(recv_counts); what follows those rows is not written.
        """

    def give_back(
        self,
        columns: Sequence[Tensor],
        recv_counts: Sequence[int],
        send_counts: Sequence[int],
        stage: str,
    ) -> AbstractContextManager[list[list[Tensor]]]:
        """Combine's exchange: rows go back along the same counts.

        Each column [N, B] lies by source rank, as `send` delivered it. The answer has, for each
        column and rank, the rows that this rank once sent there, in that order. They are there
        inside the block, and may be other ranks' memory.
        """

    def empty(self, num_rows: int, num_bytes: int) -> Tensor:
        """Rows of bytes for a result: memory that `give_back` need not copy, if there is such."""

    def close(self) -> None: ...
