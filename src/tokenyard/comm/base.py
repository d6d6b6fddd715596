"""What a communicator does: an all-to-all of byte rows, and who is to blame when it fails.

Every engine of this field has an all-to-all, so nothing else is asked of one. Between machines rows
and messages go through a communicator; ranks that share memory use it only to open a Buffer, and to
tell ranks of other nodes who is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from tokenyard.comm.process_table import ProcessWatch
from tokenyard.errors import PeerError
from tokenyard.runtime.memory import as_bytes
from tokenyard.runtime.streams import to_device, to_host

Move = Callable[[], None]
Self = TypeVar("Self", bound="Leaving")


class Leaving:
    """What a rank closes when it leaves its peers. If a `with` ends because a peer failed, the rank
    tells the others so before it closes: they may be waiting for this rank.
    """

    def tell(self, error: PeerError) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, PeerError):
            self.tell(error)
        self.close()


class Exchange(NamedTuple):
    """One all-to-all: counts[r] rows go to each rank r, in order; out_counts[r] come from it.

    With `at_most` no more than out_counts[r] come from rank r, and the rest of its share of `out`
    is left alone. Parts of a group can do that, since gloo and loopback take shorter messages.
    """

    out_NB: Tensor
    rows_NB: Tensor
    out_counts: Sequence[int]
    counts: Sequence[int]
    stage: str
    at_most: bool = False
    enclosed: Sequence[int] = ()  # how many of `counts` are rows that travel with a message
    to_all: bool = False  # one row, the same for every rank: counts is [1]


class Communicator:
    """The ranks of a group, or some of them.

    Calls block, but never for ever: PeerDied or PeerTimeout say who did not come, and where. The
    defaults are those of a communicator that sees no process die and notes no failure.
    """

    rank: int
    size: int
    name: str
    device = torch.device("cpu")  # of the rows that it moves
    members: Sequence[int]  # what its ranks are called in the whole group, and in errors

    def all_to_all(self, exchange: Exchange) -> None:
        self.start(exchange)()

    def start(self, exchange: Exchange) -> Move:
        """Begin an exchange. What this returns waits for its end; ends are awaited in order."""
        raise NotImplementedError

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        """Row r of an int64 message goes to rank r; row r of the answer came from it."""
        one_each = [1] * self.size
        message = to_device(message_RM, self.device)
        answer = torch.zeros_like(message)
        self.all_to_all(Exchange(as_bytes(answer), as_bytes(message), one_each, one_each, stage))
        return to_host(answer)

    def exchange_counted(
        self, message_RM: Tensor, numbers: Tensor, stage: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Exchange a message that lies on this communicator's device. The host reads the answer
        together with `numbers`, an int64 tensor of this rank: it waits once for both.
        """
        one_each = [1] * self.size
        answer = torch.zeros_like(message_RM)
        self.all_to_all(Exchange(as_bytes(answer), as_bytes(message_RM), one_each, one_each, stage))
        here = to_host(torch.cat([answer.flatten(), numbers]))
        return here[: answer.numel()].reshape(answer.shape), here[answer.numel() :]

    def tell_all(self, row_M: np.ndarray, stage: str) -> np.ndarray:
        """Tell all ranks the same int64s; row r of the answer came from rank r."""
        return self.exchange(np.tile(row_M, (self.size, 1)), stage)

    def gather(self, numbers: Sequence[int], stage: str) -> list[list[int]]:
        """These numbers of every rank: answer[i][r] is number i of rank r."""
        return self.tell_all(np.array(numbers, np.int64), stage).T.tolist()

    def part(self, members: Sequence[int], name: str) -> Communicator:
        """A communicator of some ranks, which all of them make at once under the same name."""
        raise NotImplementedError

    def own(self, name: str) -> Communicator:
        """All ranks, on connections that nobody else uses, so that any thread may use them.

        All ranks make it at once, under a name that is new for every Buffer, and close it with the
        Buffer.
        """
        return self.part(range(self.size), name)

    def watch(self, look: Callable[[str], None]) -> None:
        """A rank that waits long here calls look(stage), which may raise, now and then."""

    def waits_elsewhere(self) -> None:
        """From now on its ranks also wait for each other in shared memory, which it cannot see."""

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        """Who is to blame for an error of the engine beneath."""
        raise NotImplementedError

    def hears_of_waits(self, since: float) -> bool:
        """Whether another rank has waited in vain, as this one first heard after `since`."""
        return False

    def settle(self, label: str, processes: ProcessWatch) -> None:
        """Ranks have met: from now on notes about failures are those of the Buffer `label`."""

    def dead_ranks(self) -> tuple[int, ...]:
        """The ranks of this machine that can be seen to have died."""
        return ()

    def report(self, error: PeerError | None = None) -> None:
        """Note for the other ranks that this one lives and has noticed a failure, or that it
        leaves (PeerLeft with its own number). The first note that names a culprit stays.
        """

    def close(self) -> None:
        raise NotImplementedError
