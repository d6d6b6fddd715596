"""What a transport does.

A *transport* makes the two row exchanges of expert parallelism out of whatever it has: a
communicator, memory that ranks share, or other transports. Kernels are handed to it; it never
imports a set of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard.comm.base import Move
from tokenyard.errors import PeerError
from tokenyard.types import Config, Flow, Handle


class Sum(NamedTuple):
    """One column of a combine: rows that go back, and where their sums go."""

    rows_ND: Tensor  # by source rank, as dispatch delivered them
    biases_TD: Sequence[Tensor]
    out_TD: Tensor


class Transport(Protocol):
    """Calls come in pairs: an offer, whose words travel with those of the agreement between ranks,
    and the exchange itself, which is told what every rank offered, and returns a `Move`. The move
    does the work, at once or on another thread; moves are made one by one, in the order of calls.

    Offers never fail: what goes wrong is said in their words, and raises on all ranks afterwards.
    """

    rank: int
    size: int
    name: str
    moves_alone: bool  # no exchange of words may take place while rows move
    offers_memory: (
        bool  # ranks tell each other of a result's memory, so that all raise if one fails
    )

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        """Row r of an int64 message goes to rank r; row r of the answer came from it."""

    def offer_rows(self, flow: Flow | None, widths: Sequence[int]) -> Sequence[int]:
        """Before a dispatch: of this flow, or of one that is not known yet."""

    def learn_route(
        self, flow: Flow, is_token_in_rank_TR: Tensor, widths: Sequence[int], stage: str
    ) -> Any:
        """Once a dispatch's counts are known: what this transport needs to know besides, now and
        whenever rows go the same way again. It becomes `flow.two_level`.
        """

    def send(
        self,
        columns: Sequence[Tensor],
        flow: Flow,
        told_RW: np.ndarray,
        config: Config,
        stage: str,
    ) -> tuple[list[Tensor], Move]:
        """Dispatch's exchange. Each column [T, D] arrives as [num_rows, D], by (source, token).

        Rows after those that arrive are not written.
        """

    def offer_back(self, columns: Sequence[Tensor], flow: Flow, ready: bool) -> np.ndarray:
        """Before a combine of these rows; `ready` if they can be read already. [R, W]"""

    def sum_back(
        self,
        sums: Sequence[Sum],
        handle: Handle,
        told_RW: np.ndarray,
        config: Config,
        stage: str,
    ) -> Move:
        """Combine's exchange: rows go back the way they came, and each token's are summed."""

    def tell(self, error: PeerError) -> None:
        """Tell the other ranks who is at fault, as far as they do not see it: this rank, mostly."""

    def dead_ranks(self) -> tuple[int, ...]:
        """Those that can be seen to have died without asking anybody."""

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        """Who is to blame for an error between these ranks, of ours or of somebody else."""

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory for a result: such that `sum_back` need not copy it, if there is such memory."""

    def close(self) -> None: ...
