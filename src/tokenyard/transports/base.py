"""What a transport does, and what it does unless it says otherwise.

A *transport* makes the two row exchanges of expert parallelism out of what it has: a communicator,
memory that ranks share, or both. Kernels are handed to it; it never imports a set of them. A new
one is a subclass of `CommunicatorTransport` or `SharedMemoryTransport` with `send` and `sum_back`,
and a line in `choose.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard.comm.base import Communicator, Leaving, Move
from tokenyard.errors import PeerError
from tokenyard.kernels.base import RowKernels
from tokenyard.results import Handle
from tokenyard.runtime import memory
from tokenyard.shm import shared_rows
from tokenyard.shm.node import SharedNode
from tokenyard.shm.shared_rows import SharedRows
from tokenyard.types import Config, Flow, Route
from tokenyard.wire.columns import row_widths
from tokenyard.wire.signals import ROWS


@dataclass(slots=True)
class Offer:
    """What a rank offers before rows move: words for the other ranks, and the memory they name.

    The words travel with those of the agreement between ranks. An offer never fails: words say what
    went wrong, and all ranks raise once they have heard it.
    """

    words: Sequence[int] | np.ndarray = ()  # [W] for all ranks, or [R, W]: row r for rank r
    blocks: tuple[SharedRows, ...] = ()
    enclosed: Any = None  # rows so few that they travel with the words
    came: Any = None  # once ranks have met: the rows of all ranks, if all enclosed theirs
    is_mixed: bool = False  # once ranks have met: some have offered nothing, and not all enclosed


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
    tells_from_device = False  # messages may lie on the device of the results
    agrees_by_nodes = False  # answers of `meet` say that ranks differ or failed, not more
    node: SharedNode | None = None  # of all ranks, if they share one: low-latency calls use it

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        """Row r of an int64 message goes to rank r; row r of the answer came from it."""
        raise NotImplementedError

    def meet(
        self, message_RM: np.ndarray, offer: Offer, stage: str, width: int
    ) -> tuple[np.ndarray, Offer]:
        """Exchange a message, whose payload is so wide, and the rows that the offer encloses: the
        answer, and the offer. Of the payload only the first number must come from each rank; the
        others may come as sums, in the rows of some ranks.
        """
        return self.exchange(message_RM, stage), offer

    def exchange_counted(
        self, message_RM: Tensor, numbers: Tensor, stage: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Exchange a message on the device, if the transport `tells_from_device`. The host waits
        once, for the answer and for `numbers` of this rank.
        """
        raise NotImplementedError

    def offer_rows(self, flow: Flow | None, widths: Sequence[int]) -> Offer:
        """Offer memory before a dispatch along this flow, or along one that is not known yet."""
        return Offer()

    def enclose_rows(
        self, columns: Sequence[Tensor], is_token_in_rank_TR: Tensor, ready: bool
    ) -> Offer | None:
        """Before a dispatch, instead of `offer_rows`: an offer that encloses the rows. None if this
        transport does not do so, or not with so many, or they are not `ready` to be read.
        """
        return None

    def offer_dispatch(
        self,
        flow: Flow | None,
        columns: Sequence[Tensor | None],
        is_token_in_rank_TR: Tensor,
        ready: bool,
    ) -> Offer:
        """Enclose columns before their dispatch, or offer memory for the rows that come."""
        present = [column for column in columns if column is not None]
        enclosing = self.enclose_rows(present, is_token_in_rank_TR, ready)
        return enclosing or self.offer_rows(flow, row_widths(present))

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

    def list_by_lane(self, route: Route, topk_idx_TK: Tensor, rank_of_expert_E: Tensor) -> bool:
        """Let combines along this route add what ranks send back for a token by the last top-k lane
        that each has, instead of by rank. False if this transport cannot.
        """
        return False

    def offer_back(self, columns: Sequence[Tensor], flow: Flow, ready: bool) -> Offer:
        """Offer rows before their combine; `ready` if they can be read already."""
        return Offer()

    def enclose_back(self, sums: Sequence[Sum], handle: Handle, ready: bool) -> Offer | None:
        """Enclose rows before their combine, instead of `offer_back`; None where it does not."""
        return None

    def offer_combine(self, sums: Sequence[Sum], handle: Handle, ready: bool) -> Offer:
        """Enclose rows before their combine, or offer them where they lie."""
        enclosing = self.enclose_back(sums, handle, ready)
        return enclosing or self.offer_back([one.rows_ND for one in sums], handle.flow, ready)

    def sum_back(self, back: RowsBack) -> Move:
        """Combine's exchange: rows go back the way they came, and each token's are summed."""
        raise NotImplementedError

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory for a result: where `sum_back` need not copy it, if there is such memory."""
        return memory.empty(num_rows, width, dtype=dtype, device=self.device)

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds, by what they are for."""
        return {}

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

    def exchange_counted(
        self, message_RM: Tensor, numbers: Tensor, stage: str
    ) -> tuple[np.ndarray, np.ndarray]:
        return self._communicator.exchange_counted(message_RM, numbers, stage)

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

    def memory(self) -> dict[str, int]:
        return self._node.memory()

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
