"""The low-latency mode's exchange where ranks share no memory: rows, on connections of its own.

Ranks agree before rows travel, as in every other call: each tells the others what it calls, and how
many rows go to each of them. So a call has two exchanges, and all ranks know of bad input and of
differences before any row moves.

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
from tokenyard.engine.agreement import Agreement, Call, Terms
from tokenyard.engine.mismatch import STAGES
from tokenyard.engine.statistics import Statistics
from tokenyard.kernels.base import SlotKernels
from tokenyard.low_latency.handle import STAGE_OF, LowLatencyHandle, PendingCombine
from tokenyard.low_latency.result_memory import Arrived
from tokenyard.runtime import memory
from tokenyard.runtime.memory import as_bytes
from tokenyard.transports.base import Transport
from tokenyard.transports.collective import pack_records, unpack_records
from tokenyard.types import ROW_DTYPES, round_up
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
    take: Callable[[_Mail], None]  # what is done with what came
    # The number of rows of sent_NB that so many rows of the call take.
    units: Callable[[int], int] = int
    rows_from: list[int] = field(default_factory=list)
    came_NB: Tensor = field(default_factory=partial(torch.empty, 0))
    spent: int = 0  # nanoseconds
    began: int = field(default_factory=time.monotonic_ns)

    def parcels(self) -> Sequence[Tensor]:
        """The parcels that came, by the rank that sent them."""
        return self.came_NB.split(list(map(self.units, self.rows_from)))


class ExchangedSlots:
    travels = True

    def __init__(
        self,
        transport: Transport,
        kernels: SlotKernels,
        own: Communicator,
        agreement: Agreement,
        statistics: Statistics,
    ) -> None:
        """`own` are connections that nobody else uses."""
        self._statistics = statistics
        self.moves_alone = transport.moves_alone
        self._kernels, self._own, self._agreement = kernels, own, agreement
        self._mail: dict[tuple[int, int], _Mail] = {}  # by kind and number of a call

    def send_dispatch(
        self,
        number: int,
        x: Tensor,
        topk_idx: Tensor,
        handle: LowLatencyHandle,
        out: Arrived,
        totals: Tensor | None,
    ) -> int:
        """Lay tokens out. -1, or the place of a bad pair, as `stage_slots` gives it."""
        shape = handle.shape
        block = memory.empty(shape.block_bytes)
        bad = self._kernels.stage_slots(x, topk_idx, shape, block, handle.sent)
        if bad == -1:
            tokens, rows_to = _receivers(topk_idx.numpy(), shape)
            numbers = as_bytes(torch.arange(shape.num_max, device="cpu")[:, None])
            records = pack_records(self._kernels, [numbers, *_columns(block, shape)], tokens)
            results = SlotResults(*out, handle.src_info, handle.ranges)
            take = partial(self._fill, shape, results, totals)
            mail = _Mail(records, rows_to, records.shape[1], take)
            self._agree(DISPATCH, number, mail, shape, shape.dtype)
        return bad

    def _fill(self, shape: SlotShape, out: SlotResults, totals: Tensor | None, mail: _Mail) -> None:
        """Rebuild the senders' blocks with the tokens of this rank, and fill slots from them."""
        blocks, num_tokens = [], []
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
        load = self._statistics.load(shape.placement)
        load += out.counts.numpy()

    def send_combine(self, number: int, y: Tensor, back: PendingCombine, out: Tensor) -> int:
        """Lay rows out. -1, or the place of a pair that dispatch did not send."""
        handle, shape = back.handle, back.handle.shape
        picked = memory.empty(*back.topk_idx.shape, dtype=torch.int64)
        bad = self._kernels.pick_slots(back.topk_idx, handle.sent, picked)
        if bad != -1:
            return bad
        rows_to = (handle.ranges & LOW).sum(0).tolist()
        units = partial(_back_words, shape, y.dtype)
        take = partial(self._sum, back, SlotPairs(back.topk_idx, picked, back.weights), out)
        sent = memory.empty(sum(map(units, rows_to)), _WORD)
        parts = _back_parts(sent, rows_to, shape, y.dtype)
        tables = torch.zeros(
            len(rows_to), shape.placement.most_experts, dtype=torch.int64, device="cpu"
        )
        outs = [as_bytes(rows) for _, rows in parts]
        self._kernels.stage_back(y, handle.ranges, outs, tables)
        for (table, _), told in zip(parts, tables):
            table.copy_(told)
        mail = _Mail(sent, rows_to, shape.hidden * y.element_size(), take, units)
        self._agree(COMBINE, number, mail, shape, y.dtype, handle.number)
        return -1

    def _sum(self, back: PendingCombine, pairs: SlotPairs, out: Tensor, mail: _Mail) -> None:
        shape = back.handle.shape
        tables, rows = zip(*_back_parts(mail.came_NB, mail.rows_from, shape, back.dtype))
        self._kernels.sum_slots(rows, torch.stack(tables), pairs, shape, out)

    def receive(self, kind: int, number: int, held: object, waits: Tensor | None) -> None:
        """The other half of a call, whose rows have travelled."""
        mail = self._mail.pop((kind, number))
        if waits is not None:  # one exchange brings all, so that all are waited for as long
            waits += mail.spent
        mail.take(mail)
        counts = mail.rows_to, mail.rows_from
        self._statistics.count(STAGE_OF[kind], mail.began, *counts, mail.row_bytes)

    def _agree(
        self,
        kind: int,
        number: int,
        mail: _Mail,
        shape: SlotShape,
        dtype: torch.dtype,
        handle: int = -1,
    ) -> None:
        """Meet the others, as in any call: so those of other calls, or of other sizes, find out,
        and each rank knows what comes from whom.
        """
        call = Call(
            stage=STAGES.index(STAGE_OF[kind]),
            handle=handle,
            hidden=shape.hidden,
            dtype=ROW_DTYPES.index(dtype),
            num_topk=shape.num_topk,
            num_experts=shape.placement.num_experts,
            num_max=shape.num_max,
            cast=shape.cast,
        )
        rows_to_R1 = np.array(mail.rows_to, np.int64)[:, None]
        begin = time.perf_counter_ns()
        told_R1 = self._agreement.meet(STAGE_OF[kind], Terms(call, payload=rows_to_R1)).payload
        mail.rows_from, mail.spent = told_R1[:, 0].tolist(), time.perf_counter_ns() - begin
        self._mail[kind, number] = mail

    def travel(self, kind: int, number: int) -> None:
        """The exchange itself, which may be made on another thread."""
        begin, mail = time.perf_counter_ns(), self._mail[kind, number]
        out_counts, counts = (list(map(mail.units, one)) for one in (mail.rows_from, mail.rows_to))
        mail.came_NB = memory.empty(sum(out_counts), mail.sent_NB.shape[1])
        self._own.all_to_all(
            Exchange(mail.came_NB, mail.sent_NB, out_counts, counts, STAGE_OF[kind])
        )
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

    def fail(self, kind: int, number: int, error: Exception, unread: bool) -> None:
        raise AssertionError("ranks that meet in every call hear of failures there")

    def skip(self, kind: int, number: int) -> None:
        """Instead of receiving, or of sending."""
        self._mail.pop((kind, number), None)


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
