"""The low-latency mode's exchange where ranks share no memory: rows, on connections of its own.

Ranks agree before rows travel, as in every other call: each tells the others what it calls, and how
many rows go to each of them (see `LowLatency`). So a call has two exchanges, and all ranks know of
bad input and of differences before any row moves.

A dispatch sends records. A record is a token that an expert of the receiver gets: its number, and
the part of the sender's block that belongs to it. A combine sends each rank one piece: a table that
says where each expert's rows begin, and then the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tokenyard.comm.base import Communicator, Exchange
from tokenyard.engine.statistics import Statistics
from tokenyard.kernels.base import SlotKernels
from tokenyard.low_latency.handle import STAGE_OF, PendingCombine
from tokenyard.runtime import memory
from tokenyard.runtime.memory import as_bytes
from tokenyard.transports.base import Transport
from tokenyard.transports.collective import pack_records, unpack_records
from tokenyard.types import round_up
from tokenyard.wire.fp8 import NO_CAST
from tokenyard.wire.slots import COMBINE, DISPATCH, SlotPairs, SlotResults, SlotShape
from tokenyard.wire.verdicts import LOW

_WORD = 8  # bytes: what goes back is sent in words, so that all of it is aligned


@dataclass
class _Mail:
    """What goes to each rank, one after the other, and what comes from them."""

    sent_NB: Tensor
    rows_to: list[int]
    row_bytes: int
    # The number of rows of sent_NB that so many rows of the call take.
    units: Callable[[int], int] = int
    rows_from: list[int] = field(default_factory=list)
    came_NB: Tensor = field(default_factory=partial(torch.empty, 0))
    spent: int = 0  # nanoseconds
    began: int = field(default_factory=time.monotonic_ns)

    def parcels(self) -> Sequence[Tensor]:
        """By the rank that sent them."""
        return self.came_NB.split(list(map(self.units, self.rows_from)))


class ExchangedSlots:
    travels = True

    def __init__(
        self,
        transport: Transport,
        kernels: SlotKernels,
        own: Communicator,
        statistics: Statistics,
    ) -> None:
        """`own` are connections that nobody else uses."""
        self._statistics = statistics
        self.moves_alone = transport.moves_alone
        self._kernels, self._own = kernels, own
        self._mail: dict[tuple[int, int], _Mail] = {}  # by kind and number of a call

    def send_dispatch(
        self, number: int, x: Tensor, topk_idx: Tensor, shape: SlotShape, sent: Tensor, stage: str
    ) -> int:
        """Lay tokens out. -1, or the place of a bad pair, as `stage_slots` gives it."""
        block = memory.empty(shape.block_bytes)
        bad = self._kernels.stage_slots(x, topk_idx, shape, block, sent)
        if bad == -1:
            tokens, rows_to = _receivers(topk_idx.numpy(), shape)
            numbers = as_bytes(torch.arange(shape.num_max, device="cpu")[:, None])
            records = pack_records(self._kernels, [numbers, *_columns(block, shape)], tokens)
            self._mail[DISPATCH, number] = _Mail(records, rows_to, records.shape[1])
        return bad

    def receive_dispatch(
        self,
        number: int,
        shape: SlotShape,
        out: SlotResults,
        totals: Tensor | None,
        waits: Tensor | None,
        stage: str,
    ) -> None:
        """Rebuild the senders' blocks with the tokens of this rank, and fill slots from them."""
        blocks, num_tokens = [], []
        mail = self._read(DISPATCH, number, waits)
        for records in mail.parcels():
            block = memory.empty(shape.block_bytes)
            columns = _columns(block, shape)
            came = [memory.empty(len(records), column.shape[1]) for column in columns]
            numbers = memory.empty(len(records), 1, dtype=torch.int64)
            unpack_records(self._kernels, records, [as_bytes(numbers), *came])
            columns[0].fill_(255)  # -1, which is no expert
            for column, rows in zip(columns, came):
                column.index_copy_(0, numbers[:, 0], rows)
            blocks.append(block)
            num_tokens.append(1 + int(numbers[-1]) if len(records) else 0)
        self._kernels.fill_slots(blocks, num_tokens, shape, out)
        if totals is not None:
            totals += out.counts
        load = self._statistics.load(shape.placement.num_experts, shape.num_local)
        load += out.counts.numpy()
        self._count(DISPATCH, mail)

    def send_combine(self, number: int, y: Tensor, back: PendingCombine, stage: str) -> int:
        """Lay rows out. -1, or the place of a pair that dispatch did not send."""
        shape, ranges = back.handle.shape, back.handle.layout_range
        rows_to = (ranges & LOW).sum(0).tolist()
        units = partial(_back_words, shape, y.dtype)
        row_bytes = shape.hidden * y.element_size()
        mail = _Mail(memory.empty(sum(map(units, rows_to)), _WORD), rows_to, row_bytes, units)
        parts = _back_parts(mail.sent_NB, rows_to, shape, y.dtype)
        tables = torch.zeros(
            len(rows_to), shape.placement.most_experts, dtype=torch.int64, device="cpu"
        )
        self._kernels.stage_back(y, ranges, [as_bytes(rows) for _, rows in parts], tables)
        for (table, _), told in zip(parts, tables):
            table.copy_(told)
        self._mail[COMBINE, number] = mail
        return self._kernels.pick_slots(back.topk_idx, back.handle.sent, back.picked)

    def receive_combine(
        self, number: int, back: PendingCombine, out: Tensor, waits: Tensor | None, stage: str
    ) -> None:
        mail, shape = self._read(COMBINE, number, waits), back.handle.shape
        tables, rows = zip(*_back_parts(mail.came_NB, mail.rows_from, shape, back.dtype))
        pairs = SlotPairs(back.topk_idx, back.picked, back.weights)
        self._kernels.sum_slots(rows, torch.stack(tables), pairs, shape, out)
        self._count(COMBINE, mail)

    def rows_to(self, kind: int, number: int) -> np.ndarray:
        """[R, 1]: how many rows go to each rank in a call that was sent."""
        return np.array(self._mail[kind, number].rows_to, np.int64)[:, None]

    def expect(self, kind: int, number: int, told_R1: np.ndarray, spent: int) -> None:
        """So many rows come from each rank, which took so many nanoseconds to say so."""
        mail = self._mail[kind, number]
        mail.rows_from, mail.spent = told_R1[:, 0].tolist(), spent

    def travel(self, kind: int, number: int, stage: str) -> None:
        """The exchange itself, which may be made on another thread."""
        begin, mail = time.perf_counter_ns(), self._mail[kind, number]
        out_counts, counts = (list(map(mail.units, one)) for one in (mail.rows_from, mail.rows_to))
        mail.came_NB = memory.empty(sum(out_counts), mail.sent_NB.shape[1])
        self._own.all_to_all(Exchange(mail.came_NB, mail.sent_NB, out_counts, counts, stage))
        mail.spent += time.perf_counter_ns() - begin

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
        raise AssertionError("ranks that meet in every call hear of failures there")

    def skip(self, kind: int, number: int) -> None:
        """Instead of receiving, or of sending."""
        self._mail.pop((kind, number), None)

    def _count(self, kind: int, mail: _Mail) -> None:
        counts = mail.rows_to, mail.rows_from
        self._statistics.count(STAGE_OF[kind], mail.began, *counts, mail.row_bytes)

    def _read(self, kind: int, number: int, waits: Tensor | None) -> _Mail:
        mail = self._mail.pop((kind, number))
        if waits is not None:  # one exchange brings all, so that all are waited for as long
            waits += mail.spent
        return mail


def _receivers(topk_idx_TK: np.ndarray, shape: SlotShape) -> tuple[Tensor, list[int]]:
    """The tokens that go to each rank, one rank after the other, and how many they are."""
    num_tokens, num_ranks = len(topk_idx_TK), shape.num_ranks
    owners = np.append(shape.placement.rank_of_expert.numpy(), num_ranks)  # of -1: nobody
    marks_RT = np.zeros((num_ranks + 1, num_tokens), bool)
    marks_RT[owners[topk_idx_TK], np.arange(num_tokens)[:, None]] = True
    ranks, tokens = np.nonzero(marks_RT[:num_ranks])
    index = torch.from_numpy(tokens.astype(np.int32))
    return index, np.bincount(ranks, minlength=num_ranks).tolist()


def _columns(block_B: Tensor, shape: SlotShape) -> list[Tensor]:
    """What a block has of each token, as bytes [num_max, B]: topk_idx, row, and scales in FP8."""
    starts = [(0, 8 * shape.num_topk), (shape.rows_at, shape.row_bytes)]
    if shape.cast != NO_CAST:
        starts.append((shape.scales_at, shape.scale_bytes))
    num_max = shape.num_max
    return [block_B[at : at + num_max * width].view(num_max, width) for at, width in starts]


def _back_words(shape: SlotShape, dtype: torch.dtype, num_rows: int) -> int:
    """What a table and so many rows take."""
    rows = round_up(num_rows * shape.hidden * dtype.itemsize, _WORD)
    return shape.placement.most_experts + rows // _WORD


def _back_parts(
    words_NB: Tensor, num_rows: Sequence[int], shape: SlotShape, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """The table [L], and the rows, of each rank."""
    parts, most = [], shape.placement.most_experts
    parcels = words_NB.split([_back_words(shape, dtype, num) for num in num_rows])
    for parcel, num in zip(parcels, num_rows):
        row_bytes = parcel[most:].reshape(-1)[: num * shape.hidden * dtype.itemsize]
        parts.append(
            (parcel[:most].view(torch.int64)[:, 0], row_bytes.view(dtype).view(num, shape.hidden))
        )
    return parts
