"""What the calls of a Buffer return: tuples that unpack as DeepEP's do, and the one handle of any
dispatch, with its ledger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard.runtime.events import EventHandle, EventOverlap
from tokenyard.types import ByExpert, Flow, KnownPairs, Origin

Rows = Tensor | tuple[Tensor, Tensor]


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
    """The ledger of a dispatch that the engine has made, or whose handle was copied or pickled."""

    def __init__(self, flow: Flow, is_token_in_rank: Tensor, src_idx: Tensor) -> None:
        self.flow, self.is_token_in_rank, self.src_idx = flow, is_token_in_rank, src_idx
        self.num_tokens, self.num_rows = is_token_in_rank.shape[0], flow.num_rows
        self.num_copies, self.tokens_R = sum(flow.route.send_counts), flow.tokens_R


@dataclass(eq=False)
class Handle:
    """What a dispatch remembers, so that combine and cached dispatches can use its route again.

    A `tokenyard.Buffer`'s can be read like DeepEP V1's tuple, by place or by name, and the tuple
    that it unpacks to can be given to a Buffer in its place (`compat`). Pickling it waits until
    the rows have arrived.
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

    # Copies: calls go by the ledger, whatever becomes of what a user holds.
    @cached_property
    def is_token_in_rank(self) -> Tensor:
        """[T, R] bool: which ranks get each token."""
        return self.ledger.is_token_in_rank.clone()

    @cached_property
    def recv_src_idx(self) -> Tensor:
        """[N] int32: each row's token on its source rank, -1 in the rows that num_worst_tokens
        adds. Waits until rows have arrived.
        """
        self.wait()
        return self.ledger.src_idx.clone()

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
        """A field of another form, which the handle keeps."""
        if _form is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")
        value = _form.read(self, name)
        setattr(self, name, value)
        return value

    @property
    def v1_fields(self) -> tuple[str, ...]:
        """The names of V1's fields, in V1's order: six on one node, ten on several."""
        return () if _form is None else _form.names(self.nodes)

    def __len__(self) -> int:
        return len(self.v1_fields)

    def __iter__(self) -> Iterator[Tensor | None]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(len(self))[index])
        if _form is None:
            raise TypeError("a handle is a tuple only where tokenyard.Buffer was imported")
        return _form.at(self, index)

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
        ledger, known = self.ledger, self.by_expert
        ledger = ListedLedger(ledger.flow, ledger.is_token_in_rank, ledger.src_idx)
        known = known and ByExpert(
            num_rows=known.num_rows, row_of=known.row_of, topk_weights=known.topk_weights
        )
        return {**self.__dict__, "ledger": ledger, "arrived": None, "by_expert": known}


class Form(Protocol):
    """How else a handle reads: as the tuple of DeepEP V1 (`compat.v1_fields`)."""

    def names(self, nodes: tuple[int, ...]) -> tuple[str, ...]:
        """The names of the tuple's fields, where ranks are on these nodes."""
        ...

    def at(self, handle: Handle, place: int) -> Tensor | None:
        """The field at this place."""
        ...

    def read(self, handle: Handle, name: str) -> Tensor | None:
        """A field that only the tuple has. Raises AttributeError for any other name."""
        ...

    def find(self, value: Any) -> Handle | None:
        """The handle whose fields these are; None if there is no such handle."""
        ...


_form: Form | None = None


def read_handles_as(form: Form) -> None:
    """From now on all handles of this process can be read so, and given so to a Buffer."""
    global _form
    _form = form


def handle_of(value: Any) -> Handle | None:
    """The handle that this is, or stands for."""
    if isinstance(value, Handle):
        return value
    return None if _form is None else _form.find(value)


class DispatchLayout(NamedTuple):
    """What get_dispatch_layout returns: who gets each token of this rank.

        num_tokens_per_rank       [R] int32
        num_tokens_per_rdma_rank  [nodes] int32, or None on one node
        num_tokens_per_expert     [E] int32
        is_token_in_rank          [T, R] bool

    It unpacks as DeepEP's tuple does.
    """

    num_tokens_per_rank: Tensor
    num_tokens_per_rdma_rank: Tensor | None
    num_tokens_per_expert: Tensor
    is_token_in_rank: Tensor
    event: EventOverlap


class Dispatched(NamedTuple):
    """What dispatch returns, in DeepEP's order.

        recv_x                           [N, D], or the pair (rows, scales), by (source rank, token)
        recv_topk_idx                    [N, K] local expert ids, -1 where an expert lives elsewhere
        recv_topk_weights                [N, K], 0 there
        num_recv_tokens_per_expert_list  one count a local expert, rounded up to expert_alignment
        handle                           for combine, and for dispatching along the same way again
        event                            when rows can be read, with async_finish

    After a dispatch with a handle all but recv_x and event are None.
    """

    recv_x: Rows
    recv_topk_idx: Tensor | None
    recv_topk_weights: Tensor | None
    num_recv_tokens_per_expert_list: list[int] | None
    handle: Handle | None
    event: EventOverlap


class Combined(NamedTuple):
    """What combine returns: x [T, D], the sums, and topk_weights [T, K] if they were given."""

    x: Tensor
    topk_weights: Tensor | None
    event: EventOverlap


class DispatchedByExpert(NamedTuple):
    """What dispatch_by_expert returns: rows by expert, where each expert's end, and the handle."""

    x: Rows
    offsets: Tensor
    num_tokens_per_expert: list[int]
    handle: Handle


class Gathered(NamedTuple):
    """What all_gather returns: the rows of all ranks, and the handle by which sums come back."""

    x: Tensor
    handle: Handle
