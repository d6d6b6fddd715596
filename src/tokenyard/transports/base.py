"""What a transport does, and what it does unless it says otherwise.

A *transport* makes the two row exchanges of expert parallelism out of what it has: a communicator,
memory that ranks share, or both. Kernels are handed to it; it never imports a set of them. A new
one is a subclass of `CommunicatorTransport` or `SharedMemoryTransport` with `send` and `sum_back`,
and a line in `choose.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard.comm.base import Communicator, Leaving, Move
from tokenyard.errors import PeerError
from tokenyard.kernels.base import RowKernels
from tokenyard.runtime import memory
from tokenyard.shm import shared_rows
from tokenyard.shm.control import ROWS
from tokenyard.shm.node import SharedNode
from tokenyard.shm.shared_rows import SharedRows
from tokenyard.types import Config, Flow, Handle


@dataclass(slots=True)
class Offer:
    """What a rank offers before rows move: words for the other ranks, and the memory they name.

    The words travel with those of the agreement between ranks. An offer never fails: words say what
    went wrong, and all ranks raise once they have heard it.
    """

    words: Sequence[int] | np.ndarray = ()  # [W] for all ranks, or [R, W]: row r for rank r
    blocks: tuple[SharedRows, ...] = ()

    def take_blocks(self) -> tuple[SharedRows, ...]:
        """The memory, which the offer lets go: what does not fit can be taken again at once."""
        blocks, self.blocks = self.blocks, ()
        return blocks


class Sum(NamedTuple):
    """One column of a combine: rows that go back, and where their sums go."""

    rows_ND: Tensor  # by source rank, as dispatch delivered them
    biases_TD: Sequence[Tensor]
    out_TD: Tensor


class RowsOut(NamedTuple):
    """The rows of a dispatch, once all ranks have agreed on it."""

    columns: Sequence[Tensor]  # [T, D] each
    flow: Flow
    offer: Offer  # this rank's
    told_RW: np.ndarray  # what every rank offered
    config: Config
    stage: str


class RowsBack(NamedTuple):
    """The rows of a combine, once all ranks have agreed on it."""

    sums: Sequence[Sum]
    handle: Handle
    offer: Offer  # this rank's
    told_RW: np.ndarray  # what every rank offered
    config: Config
    stage: str


class Transport(Leaving):
    """An exchange has two calls: an offer, and, once every rank has heard those of all others, the
    exchange itself. That returns a `Move`, which does the work, at once or on another thread. Moves
    are made one by one, in the order of the calls.

    The defaults are those of a transport that offers nothing, has nothing to learn, and sees nobody
    die.
    """

    rank: int
    size: int
    name: str
    device = torch.device("cpu")  # of the results
    moves_alone = False  # no messages may be exchanged while rows move
    # Ranks tell each other in their offers whether they have memory for the result, so that all
    # raise if one has none.
    offers_memory = False
    node: SharedNode | None = None  # of all ranks, if they share one: low-latency calls use it

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        """Row r of an int64 message goes to rank r; row r of the answer came from it."""
        raise NotImplementedError

    def offer_rows(self, flow: Flow | None, widths: Sequence[int]) -> Offer:
        """Before a dispatch: along this flow, or along one that is not known yet."""
        return Offer()

    def learn_route(self, rows: RowsOut, is_token_in_rank_TR: Tensor) -> RowsOut:
        """Complete a new dispatch, whose counts are known by now: with what this transport needs to
        know about its flow, for this call and for all that go along it later (`flow.two_level`).
        """
        return rows

    def send(self, rows: RowsOut) -> tuple[list[Tensor], Move]:
        """Dispatch's exchange. Each column [T, D] arrives as [num_rows, D], by (source, token).

        Rows after those that arrive are not written.
        """
        raise NotImplementedError

    def offer_back(self, columns: Sequence[Tensor], flow: Flow, ready: bool) -> Offer:
        """Before a combine of these rows; `ready` if they can be read already."""
        return Offer()

    def sum_back(self, back: RowsBack) -> Move:
        """Combine's exchange: rows go back the way they came, and each token's are summed."""
        raise NotImplementedError

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory for a result: where `sum_back` need not copy it, if there is such memory."""
        return memory.empty(num_rows, width, dtype=dtype, device=self.device)

    def tell(self, error: PeerError) -> None:
        """Tell the other ranks who is at fault if they cannot see it: mostly this rank itself."""

    def dead_ranks(self) -> tuple[int, ...]:
        """The ranks that this one can see to have died, without asking anybody."""
        return ()

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        """Who is to blame for an error between these ranks, of ours or of another library."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class CommunicatorTransport(Transport):
    """What the transports whose messages go through a communicator have in common."""

    _communicator: Communicator  # the Buffer's own

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        return self._communicator.exchange(message_RM, stage)

    def dead_ranks(self) -> tuple[int, ...]:
        return self._communicator.dead_ranks()

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        return self._communicator.explain(stage, error)

    def close(self) -> None:
        self._communicator.close()


class SharedMemoryTransport(Transport):
    """What the transports through the memory of a node have in common."""

    _node: SharedNode

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        return self._node.mailbox.exchange(message_RM, stage)

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self._node.pool.rows(num_rows, width, dtype)

    def tell(self, error: PeerError) -> None:
        self._node.tell(error)

    def dead_ranks(self) -> tuple[int, ...]:
        return self._node.liveness.dead_ranks()

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        return self._node.liveness.explain(stage, error)

    def close(self) -> None:
        self._node.close()

    def _publish(self, back: RowsBack, all_ready: bool, kernels: RowKernels) -> None:
        """Copy the rows that other ranks cannot read where they lie, and wait until all have."""
        for one, block in zip(back.sums, back.offer.blocks):
            shared_rows.publish(one.rows_ND, block, back.handle.flow, self.rank, kernels)
        if not all_ready:
            self._node.mailbox.meet(ROWS, back.stage)
