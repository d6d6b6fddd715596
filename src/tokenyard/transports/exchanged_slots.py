"""The low-latency mode's exchange where ranks share no memory: one all-to-all of fixed size.

A record is a post and a block; every rank gets the same. On the way back it is a post, a table and
as many rows as may be owed at most. The sizes of a record follow from those of the call, on which
ranks must have agreed before: see `LowLatency`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard import memory
from tokenyard.errors import CallMismatch, rejected, text_to_words
from tokenyard.slots import (
    DTYPE_TERM,
    FAILED,
    HANDLE,
    NUMBER,
    POST_WORDS,
    TERMS,
    TEXT,
    TOKENS,
    Back,
    Received,
    SlotShape,
    say_difference,
)
from tokenyard.transports.base import Transport
from tokenyard.types import ROW_DTYPES, round_up

_POST = 8 * POST_WORDS


class SlotKernels(Protocol):
    def stage_slots(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        shape: SlotShape,
        block_B: Tensor,
        sent_2TK: Tensor,
    ) -> int: ...

    def fill_slots(
        self,
        blocks: Sequence[Tensor],
        tokens: Sequence[int],
        shape: SlotShape,
        out: Received,
    ) -> None: ...

    def stage_back(
        self, y_LSD: Tensor, layout_range_LR: Tensor, outs: Sequence[Tensor], tables_RL: Tensor
    ) -> None: ...

    def pick_slots(self, topk_idx_TK: Tensor, sent_2TK: Tensor, picked_TK: Tensor) -> int: ...

    def sum_slots(
        self,
        rows: Sequence[Tensor],
        tables_RL: Tensor,
        topk_idx_TK: Tensor,
        picked_TK: Tensor,
        topk_weights_TK: Tensor,
        shape: SlotShape,
        out_TD: Tensor,
    ) -> Tensor: ...


class ExchangedSlots:
    moves_alone = True

    def __init__(self, transport: Transport, kernels: SlotKernels) -> None:
        self._transport, self._kernels = transport, kernels
        # Whether whoever exchanges words first waits for what goes on elsewhere.
        self.may_go_on = transport.moves_alone
        self._rank, self._size = transport.rank, transport.size
        self._mail: dict[tuple[int, int], np.ndarray] = {}  # by kind and number: [R, words]
        self._last_words = [0, 0]  # of a record, by kind
        self._spent = [0, 0]  # nanoseconds in the last exchange, by kind

    def send_dispatch(
        self, number: int, x: Tensor, topk_idx: Tensor, shape: SlotShape, sent: Tensor, stage: str
    ) -> int:
        message = self._message(0, number, shape.block_bytes, shape)
        post, block = message[0], torch.from_numpy(message[0, POST_WORDS:].view(np.uint8))
        bad = self._kernels.stage_slots(x, topk_idx, shape, block, sent)
        post[TOKENS] = topk_idx.shape[0]
        message[1:] = message[0]
        return bad

    def receive_dispatch(
        self,
        number: int,
        shape: SlotShape,
        out: Received,
        totals: Tensor | None,
        waits: Tensor | None,
        stage: str,
    ) -> None:
        answer = self._read(0, number, waits, stage)
        blocks = [torch.from_numpy(record[POST_WORDS:].view(np.uint8)) for record in answer]
        self._kernels.fill_slots(blocks, answer[:, TOKENS].tolist(), shape, out)
        if totals is not None:
            totals += out.counts

    def send_combine(self, number: int, y: Tensor, back: Back, stage: str) -> int:
        shape = back.handle.shape
        message = self._message(1, number, _back_bytes(shape, y.dtype), shape)
        message[:, HANDLE] = back.handle.number
        message[:, TERMS + DTYPE_TERM] = ROW_DTYPES.index(y.dtype)
        tables, regions = _parts(message, shape, y.dtype)
        outs = [region.view(torch.uint8) for region in regions]
        self._kernels.stage_back(y, back.handle.layout_range, outs, tables)
        return self._kernels.pick_slots(back.topk_idx, back.handle.sent, back.picked)

    def receive_combine(
        self, number: int, back: Back, out: Tensor, waits: Tensor | None, stage: str
    ) -> None:
        answer = self._read(1, number, waits, stage)
        tables, regions = _parts(answer, back.handle.shape, back.dtype)
        self._kernels.sum_slots(
            regions, tables, back.topk_idx, back.picked, back.weights, back.handle.shape, out
        )

    def travel(self, kind: int, number: int, stage: str) -> None:
        """The exchange itself, which may be made on another thread."""
        begin = time.perf_counter_ns()
        self._mail[kind, number] = self._transport.exchange(self._mail[kind, number], stage)
        self._spent[kind] = time.perf_counter_ns() - begin

    def left_out(self) -> list[int]:
        return []

    def mask(self, rank: int, masked: bool) -> None:
        raise AssertionError("nobody can be left out of an exchange")

    def combine_buffer(self, shape: SlotShape, dtype: torch.dtype) -> Tensor:
        return memory.empty(shape.num_local, shape.num_slots, shape.hidden, dtype=dtype)

    def is_shared(self, y: Tensor) -> bool:
        """What is given is copied into records, from wherever it lies."""
        return True

    def fail(self, kind: int, number: int, text: str, stage: str, unread: bool) -> None:
        """Instead of sending: a record of the usual size, with nothing in it but a reason."""
        message = np.zeros((self._size, self._last_words[kind]), np.int64)
        message[:, NUMBER], message[:, FAILED] = number, 1
        message[:, TEXT:POST_WORDS] = text_to_words(text)
        self._transport.exchange(message, stage)
        self._mail.pop((kind, number), None)

    def skip(self, kind: int, number: int) -> None:
        self._mail.pop((kind, number), None)

    def _message(self, kind: int, number: int, num_bytes: int, shape: SlotShape) -> np.ndarray:
        words = POST_WORDS + num_bytes // 8
        message = memory.empty_array((self._size, words), np.int64)
        message[:, :POST_WORDS] = 0
        message[:, NUMBER] = number
        message[:, TERMS : TERMS + len(shape.terms)] = shape.terms
        self._mail[kind, number] = message
        self._last_words[kind] = words
        return message

    def _read(self, kind: int, number: int, waits: Tensor | None, stage: str) -> np.ndarray:
        """What arrived, if it can be used."""
        answer = self._mail.pop((kind, number))
        if waits is not None:  # one exchange brings all, so that all are waited for as long
            waits += self._spent[kind]
        failed = np.flatnonzero(answer[:, FAILED]).tolist()
        if failed:
            raise rejected(failed[0], answer[failed[0], TEXT:POST_WORDS], stage)
        mine = answer[self._rank]
        for rank, post in enumerate(answer):
            for words in (slice(NUMBER, NUMBER + 1), slice(HANDLE, HANDLE + 1), slice(TERMS, TEXT)):
                if (post[words] != mine[words]).any():
                    raise CallMismatch(say_difference(stage, self._rank, mine, rank, post))
        return answer


def _back_bytes(shape: SlotShape, dtype: torch.dtype) -> int:
    rows = round_up(shape.most_back * shape.hidden * dtype.itemsize, 8)
    return 8 * shape.placement.most_experts + rows


def _parts(
    message: np.ndarray, shape: SlotShape, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """The tables [R, L] of all records, and the rows of each."""
    begin = POST_WORDS + shape.placement.most_experts
    tables = torch.from_numpy(message[:, POST_WORDS:begin])
    num_bytes = shape.most_back * shape.hidden * dtype.itemsize
    rows = torch.from_numpy(message[:, begin:].view(np.uint8))[:, :num_bytes]
    return tables, [one.view(dtype).view(shape.most_back, shape.hidden) for one in rows]
