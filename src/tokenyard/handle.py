"""What a dispatch returns for combine: one handle, whoever made the dispatch, and its ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard import v1_fields
from tokenyard.types import Flow, KnownPairs, Origin

if TYPE_CHECKING:
    from tokenyard.runtime.events import EventHandle


class Ledger(Protocol):
    """What a dispatch leaves of its route: as numbers of its own, from which the rest is made when
    it is first read, or as the engine had listed it.
    """

    @property
    def num_tokens(self) -> int: ...  # T, of this rank

    @property
    def num_rows(self) -> int: ...  # N, of the result

    @property
    def num_copies(self) -> int: ...  # rows that this rank sends

    @property
    def tokens_R(self) -> np.ndarray: ...  # int64, the tokens of each rank

    @property
    def flow(self) -> Flow: ...

    @property
    def is_token_in_rank(self) -> Tensor: ...  # [T, R] bool

    @property
    def src_idx(self) -> Tensor: ...  # [N] int32, the token of each row


class ListedLedger:
    """That of a dispatch which the engine has made, and of any that was copied or pickled."""

    def __init__(self, flow: Flow, is_token_in_rank: Tensor, src_idx: Tensor) -> None:
        self.flow, self.is_token_in_rank, self.src_idx = flow, is_token_in_rank, src_idx
        self.num_tokens, self.num_rows = is_token_in_rank.shape[0], flow.num_rows
        self.num_copies, self.tokens_R = sum(flow.route.send_counts), flow.tokens_R


@dataclass(eq=False)
class Handle:
    """What a dispatch remembers, so that combine and cached dispatches can use its route again.

    It can be read like DeepEP V1's tuple, by place or by name (`v1_fields`), and the tuple that it
    unpacks to can be given to a Buffer in its place (`v1_tuple`). Pickling it waits until the rows
    have arrived.
    """

    origin: Origin
    call: int  # the number of the dispatch that made it; all ranks must use the same
    hidden: int
    combine_dtype: torch.dtype  # x's, or bfloat16 where x was quantised
    num_channels: int
    ledger: Ledger
    arrived: EventHandle | None = None  # over when rows have arrived; None if dispatch waited
    by_expert: KnownPairs | None = None  # of dispatch_by_expert

    @property
    def flow(self) -> Flow:
        """Which rows this rank sends, and how many come from whom."""
        return self.ledger.flow

    @property
    def is_token_in_rank(self) -> Tensor:
        """[T, R] bool: which ranks get each token."""
        return self.ledger.is_token_in_rank

    @property
    def recv_src_idx(self) -> Tensor:
        """[N] int32: each row's token on its source rank, -1 in the rows that num_worst_tokens
        adds. Like recv_x it may be read when the dispatch's event is over; handle[3] waits for it.
        """
        return self.ledger.src_idx

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank sent."""
        return self.ledger.num_tokens

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank."""
        return self.origin.nodes

    def wait(self) -> None:
        """Wait until rows have arrived. Raises what the dispatch raised, if it failed."""
        if self.arrived is not None:
            self.arrived.current_stream_wait()

    def __getattr__(self, name: str) -> Tensor | None:
        """A field of V1's, which the handle keeps."""
        value = v1_fields.read(self, name)
        setattr(self, name, value)
        return value

    @property
    def v1_fields(self) -> tuple[str, ...]:
        """The names of V1's fields, in V1's order: six on one node, ten on several."""
        return v1_fields.names(self.nodes)

    def __len__(self) -> int:
        return len(self.v1_fields)

    def __iter__(self) -> Iterator[Tensor | None]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(len(self))[index])
        return v1_fields.at(self, index)

    def __repr__(self) -> str:
        return (
            f"<tokenyard.Handle of dispatch call {self.call}: {self.num_tokens} tokens sent, "
            f"{self.flow.num_received} rows received, hidden {self.hidden}, "
            f"{self.num_channels} channels>"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the event, which belongs to this process, and memory of compiled calls;
        waits for the rows first.
        """
        self.wait()
        ledger = ListedLedger(self.flow, self.is_token_in_rank, self.recv_src_idx)
        return {**self.__dict__, "ledger": ledger, "arrived": None}
