"""The handle of a compiled dispatch: numbers in one piece of memory, and tensors when asked for."""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard.types import Flow, Handle, Origin, Route
from tokenyard.wire import int64s

_new = object.__new__


class Ledger:
    """What a compiled dispatch writes down of its route.

    Its memory holds, in int64, the rows from each rank to each, and the tokens of each rank; then,
    in int32, copy_start, copy_rank and copy_slot of `Route`, and the token of each row that came.
    """

    __slots__ = ("address", "memory", "num_ranks", "num_tokens", "room", "src_room")

    def __init__(self, num_tokens: int, room: int, src_room: int, num_ranks: int) -> None:
        """With room for so many rows that are sent, and that come."""
        words = num_ranks * (num_ranks + 1) + (num_tokens + 2 * room + src_room + 2) // 2
        self.memory = int64s.new(words)
        self.address = int64s.address(self.memory)
        self.num_tokens, self.num_ranks = num_tokens, num_ranks
        self.room, self.src_room = room, src_room

    def with_room(self, src_room: int) -> Ledger:
        """The same with room for so many rows that come, which are yet to be written."""
        made = Ledger(self.num_tokens, self.room, src_room, self.num_ranks)
        same = min(len(made.memory), len(self.memory))
        made.memory[:same] = self.memory[:same]
        return made

    def send_counts(self, num_copies: int) -> tuple[int, ...]:
        """How many rows go to each rank."""
        ranks = self.lists(num_copies, 0)[1].numpy()
        return tuple(np.bincount(ranks, minlength=self.num_ranks).tolist())

    def sent_RR(self) -> np.ndarray:
        size = self.num_ranks
        return np.frombuffer(self.memory, np.int64, size * size).reshape(size, size)

    def tokens_R(self) -> np.ndarray:
        size = self.num_ranks
        return np.frombuffer(self.memory, np.int64, size, 8 * size * size)

    def lists(self, num_copies: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """copy_start, copy_rank, copy_slot, and the token of each row that came."""
        begin = 8 * self.num_ranks * (self.num_ranks + 1)
        ints = torch.frombuffer(self.memory, dtype=torch.int32, offset=begin)
        ranks = self.num_tokens + 1
        slots, came = ranks + self.room, ranks + 2 * self.room
        return (
            ints[:ranks],
            ints[ranks : ranks + num_copies],
            ints[slots : slots + num_copies],
            ints[came : came + num_rows],
        )


class CompiledHandle(Handle):
    """A Handle that makes the tensors of its fields when they are first read.

    `written` makes one. Its constructor is Handle's, whose fields are given: then there is no
    ledger.
    """

    ledger: Ledger | None = None
    num_rows = num_copies = 0  # that came, and that were sent
    _rank = -1

    @staticmethod
    def written(
        origin: Origin,
        call: int,
        hidden: int,
        combine_dtype: torch.dtype,
        num_channels: int,
        ledger: Ledger,
        rank: int,
        num_rows: int,
        num_copies: int,
    ) -> CompiledHandle:
        self = _new(CompiledHandle)
        self.origin, self.call, self.hidden = origin, call, hidden
        self.combine_dtype, self.num_channels = combine_dtype, num_channels
        self.ledger, self._rank = ledger, rank
        self.num_rows, self.num_copies = num_rows, num_copies
        return self

    @property
    def num_tokens(self) -> int:
        return self.is_token_in_rank.shape[0] if self.ledger is None else self.ledger.num_tokens

    @property
    def num_tokens_of_all(self) -> int:
        if self.ledger is None:
            return super().num_tokens_of_all
        return sum(self.ledger.tokens_R().tolist())

    @cached_property
    def flow(self) -> Flow:  # type: ignore[override]
        assert self.ledger is not None
        sent_RR, tokens_R = self.ledger.sent_RR(), self.ledger.tokens_R()
        starts, ranks, slots, _ = self.ledger.lists(self.num_copies, self.num_rows)
        # Rows by rank: a stable sort of the copies, which are by token.
        order = torch.argsort(ranks, stable=True)
        tokens = torch.repeat_interleave(
            torch.arange(self.num_tokens, dtype=torch.int32, device="cpu"), starts.diff()
        )
        counts = tuple(sent_RR[self._rank].tolist())
        route = Route(tokens[order], counts, starts, ranks, slots)
        received = tuple(sent_RR[:, self._rank].tolist())
        most = int(tokens_R.sum())
        return Flow(route, received, self.num_rows, tokens_R, sent_RR.sum(0), sent_RR, most)

    @cached_property
    def is_token_in_rank(self) -> Tensor:  # type: ignore[override]
        route = self.flow.route
        marks = torch.zeros(self.num_tokens, len(route.send_counts), dtype=torch.bool, device="cpu")
        tokens = torch.repeat_interleave(
            torch.arange(self.num_tokens, device="cpu"), route.copy_start.diff()
        )
        marks[tokens, route.copy_rank.long()] = True
        return marks

    @cached_property
    def recv_src_idx(self) -> Tensor:  # type: ignore[override]
        assert self.ledger is not None
        return self.ledger.lists(self.num_copies, self.num_rows)[3]

    def __reduce__(self) -> Any:
        """Pickled and copied as what it stands for."""
        return _plain, (
            {field.name: getattr(self, field.name) for field in dataclass_fields(self)},
        )


def _plain(fields: dict[str, Any]) -> Handle:
    return Handle(**fields)
