"""What a communicator does: the little that every engine of this field can, an all-to-all of byte
rows, and who is to blame when it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tokenyard.comm.process_table import Watch
from tokenyard.errors import PeerError

Move = Callable[[], None]


class Communicator(Protocol):
    """Blocks, but never for ever: PeerDied or PeerTimeout say who did not come, and where."""

    rank: int
    size: int
    name: str
    device: torch.device  # of the rows that it moves
    members: Sequence[int]  # what its ranks are called in the whole group, and in errors

    def all_to_all(
        self,
        out_NB: Tensor,
        rows_NB: Tensor,
        out_counts: Sequence[int],
        counts: Sequence[int],
        stage: str,
    ) -> None:
        """Send counts[r] rows to each rank r, in order; out_counts[r] rows come from it."""

    def start(
        self,
        out_NB: Tensor,
        rows_NB: Tensor,
        out_counts: Sequence[int],
        counts: Sequence[int],
        stage: str,
    ) -> Move:
        """The same, begun: what it returns waits for the end. Ends are awaited in order."""

    def part(self, members: Sequence[int], name: str) -> Communicator:
        """A communicator of some ranks, which all of them make at once under the same name."""

    def own(self, name: str) -> Communicator:
        """All ranks, on connections that nobody else uses, so that any thread may: they make it at
        once, under a name that is new for every Buffer, and close it with that.
        """

    def watch(self, look: Callable[[str], None]) -> None:
        """Whoever waits long here calls look(stage), which may raise, now and then."""

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        """Who is to blame for an error of the engine beneath."""

    def settle(self, label: str, watch: Watch) -> None:
        """Ranks have met: from now on words that they leave are those of one Buffer."""

    def dead_ranks(self) -> tuple[int, ...]:
        """Those of this machine that can be seen to have died."""

    def leave_word(self, error: PeerError | None = None) -> None:
        """This rank lives, and has noticed that something is wrong, or goes (PeerLeft, with its own
        number): so the others know whom to blame. The first word that names somebody stays.
        """

    def close(self) -> None: ...
