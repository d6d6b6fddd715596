"""The low-latency mode: fixed slots instead of counts, and no round in which ranks agree.

A call sends, which never waits for this call's words of others, and then receives. What is wrong
with one rank's input is found before it sends; it then sends the reason instead of tokens, so that
the others raise too when they receive, and every rank is ready for the next call.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, from_numpy

from tokenyard import memory, validate
from tokenyard.agreement import STAGES, Agreement, Call, Terms
from tokenyard.errors import CallMismatch, PeerError, PeerInputError
from tokenyard.events import EventHandle, EventOverlap, Worker
from tokenyard.kernels import Kernels
from tokenyard.prepare import Preparation
from tokenyard.slots import (
    GROUP,
    NO_CAST,
    PACKED,
    PLAIN,
    ROUNDED,
    Back,
    LowLatencyHandle,
    Received,
    SlotShape,
)
from tokenyard.transports import Transport, open_slots
from tokenyard.types import ROW_DTYPES, round_up

DISPATCH, COMBINE = 0, 1
_STAGES = ("low-latency dispatch", "low-latency combine")
# All that a check asks of a tensor, in one step.
_form = attrgetter("__class__", "shape", "dtype", "layout", "device")
_CASTABLE = (torch.bfloat16, torch.float16, torch.float32)


class Asked(NamedTuple):
    """How a call is to end."""

    async_finish: bool
    return_recv_hook: bool
    waits: Any  # [R] int64, where the time spent waiting for each rank is added

    @property
    def is_later(self) -> bool:
        """Is anything left to do when the call returns?"""
        return self.async_finish or self.return_recv_hook


class Fp8(NamedTuple):
    """How rows are to be cast, as DeepEP says it."""

    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool

    def cast(self) -> int:
        if not self.use_fp8:
            return NO_CAST
        validate.require(
            self.round_scale or not self.use_ue8m0,
            "use_ue8m0 is True with round_scale=False, want round_scale=True",
        )
        return PACKED if self.use_ue8m0 else ROUNDED if self.round_scale else PLAIN


class Receipt:
    """The second half of a call, which is done once. As DeepEP's hook, it is simply called."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self.refused: ValueError | None = None  # of a call that another thread ended

    @property
    def is_over(self) -> bool:
        return self._work is None

    def __call__(self) -> None:
        # Let go of, so that what it would write to does not outlive the tensors of the user.
        work, self._work = self._work, None
        if work is not None:
            work()

    def on_thread(self) -> None:
        """Bad input elsewhere is for the event to raise, and does not break the Buffer."""
        try:
            self()
        except ValueError as error:
            self.refused = error


class _Unread(ValueError):
    """What was sent two calls ago has not been received here yet."""


class _Event(EventHandle):
    def __init__(self, over: EventHandle, receipt: Receipt) -> None:
        super().__init__()
        self._over, self._receipt = over, receipt

    def current_stream_wait(self) -> None:
        self._over.current_stream_wait()
        if self._receipt.refused is not None:
            raise self._receipt.refused

    @property
    def is_over(self) -> bool:
        return self._over.is_over


class _Results:
    """Memory for two results, each used again once its tensors have died."""

    def __init__(self) -> None:
        self._blocks = [np.empty(0, np.uint8)] * 2
        self._lent: list[weakref.ref[np.ndarray] | None] = [None] * 2

    def take(self, num_bytes: int) -> np.ndarray:
        for place, lent in enumerate(self._lent):
            if lent is None or lent() is None:
                if len(self._blocks[place]) < num_bytes:
                    self._blocks[place] = memory.empty_array(num_bytes, np.uint8)
                array = self._blocks[place][:num_bytes]
                self._lent[place] = weakref.ref(array)
                return array
        raise ValueError(
            "two results of low_latency_dispatch are still held, want at most one before the "
            "next call: there are two buffers, so drop recv_x (and what views it) of one first"
        )


class LowLatency:
    def __init__(
        self,
        transport: Transport,
        kernels: Kernels,
        agreement: Agreement,
        local: Preparation,
        worker: Worker,
        buffer_id: int,
        enable_shrink: bool,
    ) -> None:
        """All ranks together."""
        self._rank, self._size = transport.rank, transport.size
        self._agreement, self._local, self._worker = agreement, local, worker
        self._buffer_id, self._shrink = buffer_id, enable_shrink
        self.slots = open_slots(transport, kernels, enable_shrink, "Buffer (low latency)")
        self.failure: PeerError | None = None
        self._numbers = [0, 0]  # calls so far, by kind
        self._unread: dict[tuple[int, int], tuple[int, weakref.ref[Receipt]]] = {}
        self._results = _Results()
        self._shapes: dict[tuple[Any, ...], SlotShape] = {}
        self._checked: dict[tuple[Any, ...], SlotShape] = {}
        self._checked_back: set[tuple[Any, ...]] = set()
        self._agreed: set[tuple[Any, ...]] = set()

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        num_max: Any,
        num_experts: Any,
        totals: Any,
        fp8: Fp8,
        asked: Asked,
    ) -> tuple[Received, LowLatencyHandle, EventOverlap, Receipt | None]:
        """`totals`, if given, are increased by each expert's count."""
        number, stage = self._begin(DISPATCH), _STAGES[DISPATCH]
        try:
            self._settle(DISPATCH, number)
            self._check_asked(asked)
            x, topk_idx, shape = self._tokens(x, topk_idx, num_max, num_experts, fp8)
            if totals is not None:
                totals = _counters(
                    "cumulative_local_expert_recv_stats", totals, shape.num_local, torch.int32
                )
            self._agree(DISPATCH, shape, shape.dtype)
            out = self._take(shape)
            sent = from_numpy(memory.empty_array((2, *topk_idx.shape), np.int64))
            bad = self.slots.send_dispatch(number, x, topk_idx, shape, sent, stage)
            if bad != -1:
                raise _bad_pair(topk_idx, bad, shape)
        except (PeerError, CallMismatch, PeerInputError):  # others know already
            raise
        except Exception as error:
            raise self._fail(DISPATCH, number, error) from None

        receive = partial(
            self.slots.receive_dispatch, number, shape, out, totals, asked.waits, stage
        )
        event, receipt = self._end(DISPATCH, number, receive, asked)
        handle = LowLatencyHandle(
            src_info=out.src_info,
            layout_range=out.layout_range,
            shape=shape,
            sent=sent,
            buffer_id=self._buffer_id,
            number=number,
            receipt=receipt,
        )
        return out, handle, event, receipt

    def combine(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: Any,
        use_logfmt: bool,
        zero_copy: bool,
        out: Any,
        asked: Asked,
    ) -> tuple[Tensor, EventOverlap, Receipt | None]:
        number, stage = self._begin(COMBINE), _STAGES[COMBINE]
        try:
            self._settle(COMBINE, number)
            self._check_asked(asked)
            if use_logfmt:
                raise NotImplementedError(
                    f"{stage}: use_logfmt is True, want False: rows travel in their own dtype, "
                    f"on rank {self._rank}"
                )
            known, y, topk_idx, weights = self._rows(x, topk_idx, topk_weights, handle)
            validate.require(
                not zero_copy or self.slots.is_shared(y),
                "x is not the tensor of get_next_low_latency_combine_buffer, want that with "
                "zero_copy=True",
            )
            out = self._check_out(out, topk_idx.shape[0], y)
            self._agree(COMBINE, known.shape, y.dtype)
            picked = from_numpy(memory.empty_array(tuple(topk_idx.shape), np.int64))
            back = Back(y, y.dtype, topk_idx, weights, known, picked, zero_copy)
            if asked.is_later:  # what was given is the user's again when this returns
                own = y if zero_copy else None
                back = back._replace(own=own, topk_idx=topk_idx.clone(), weights=weights.clone())
            bad = self.slots.send_combine(number, y, back, stage)
            if bad != -1:
                raise _unsent_pair(topk_idx, bad)
        except (PeerError, CallMismatch, PeerInputError):
            raise
        except Exception as error:
            raise self._fail(COMBINE, number, error) from None

        receive = partial(self.slots.receive_combine, number, back, out, asked.waits, stage)
        event, receipt = self._end(COMBINE, number, receive, asked)
        return out, event, receipt

    def combine_buffer(self, handle: Any) -> Tensor:
        """[L, S, D] for the experts' output, where combine finds it without copying."""
        try:
            known = validate.low_latency_handle(handle, self._buffer_id)
        except ValueError as error:
            raise self._agreement.named("get_next_low_latency_combine_buffer", error) from None
        dtype = known.shape.dtype
        if dtype not in validate.SUMMABLE:
            dtype = torch.bfloat16
        return self.slots.combine_buffer(known.shape, dtype)

    def mask(self, rank: Any, masked: bool) -> None:
        self._check_shrink()
        validate.integer("rank_to_mask", rank, at_least=0, at_most=self._size - 1)
        validate.require(rank != self._rank, f"rank_to_mask is {rank}, want another rank than this")
        self.slots.mask(rank, bool(masked))

    def unmask_all(self) -> None:
        self._check_shrink()
        for rank, masked in enumerate(self.slots.masked):
            if masked:
                self.slots.mask(rank, False)

    def query_masks(self, status: Any) -> None:
        self._check_shrink()
        status = validate.tensor("mask_status", status, shape=[self._size], dtypes=(torch.int32,))
        status.copy_(torch.tensor(self.slots.masked, dtype=torch.int32))

    def _check_shrink(self) -> None:
        validate.require(
            self._shrink,
            f"enable_shrink is False, want Buffer(enable_shrink=True), on rank {self._rank}",
        )

    def _begin(self, kind: int) -> int:
        if self.slots.moves_alone:
            self._worker.drain()
        self._numbers[kind] += 1
        return self._numbers[kind]

    def _settle(self, kind: int, number: int) -> None:
        """What was sent two calls ago must have been received here too: its place is used again."""
        unread = self._unread.pop((kind, number % 2), None)
        if unread is None:
            return
        self._worker.drain()
        earlier, reference = unread
        receipt = reference()
        if receipt is None:  # nobody is left who could want it
            self.slots.skip(kind, earlier)
        elif not receipt.is_over:
            self._unread[kind, number % 2] = unread
            raise _Unread(
                f"the hook of call {earlier} was not called yet, want it called before call "
                f"{number}: there are two buffers"
            )

    def _end(
        self, kind: int, number: int, receive: Callable[[], None], asked: Asked
    ) -> tuple[EventOverlap, Receipt | None]:
        """Receive now, on the Buffer's thread, or when the hook is called."""
        travel: Callable[[], None] = partial(self.slots.travel, kind, number, _STAGES[kind])
        if not asked.is_later:
            self._worker.drain()
            travel()
            receive()
            return EventOverlap(None), None
        if asked.return_recv_hook and self.slots.moves_alone:
            travel = self._worker.submit(travel).current_stream_wait

        def work() -> None:
            try:
                travel()
                receive()
            except PeerError as error:
                self.failure = error
                raise

        receipt = Receipt(work)
        self._unread[kind, number % 2] = number, weakref.ref(receipt)
        if asked.return_recv_hook:
            return EventOverlap(None), receipt
        return EventOverlap(_Event(self._worker.submit(receipt.on_thread), receipt)), receipt

    def _fail(self, kind: int, number: int, error: Exception) -> Exception:
        """Tell the others, and give back what to raise here."""
        stage = _STAGES[kind]
        unread = isinstance(error, _Unread)
        named = self._agreement.named(stage, ValueError(*error.args) if unread else error)
        if self.slots.moves_alone and kind not in {agreed for agreed, *_ in self._agreed}:
            self._agreement.meet(stage, named)  # which is where they are, and raises
        self.slots.fail(kind, number, str(named), stage, unread)
        return named

    def _agree(self, kind: int, shape: SlotShape, dtype: torch.dtype) -> None:
        """Where ranks exchange records, their size must be the same before there are any."""
        if not self.slots.moves_alone or (kind, shape.signature, dtype) in self._agreed:
            return
        call = Call(
            stage=STAGES.index(_STAGES[kind]),
            hidden=shape.hidden,
            dtype=ROW_DTYPES.index(dtype),
            num_topk=shape.num_topk,
            num_experts=shape.placement.num_experts,
            num_max=shape.num_max,
            cast=shape.cast,
        )
        self._agreement.meet(_STAGES[kind], Terms(call))
        self._agreed.add((kind, shape.signature, dtype))

    def _shape(
        self, x: Tensor, num_topk: int, num_max: int, num_experts: Any, cast: int
    ) -> SlotShape:
        if type(num_experts) is not int:  # and so may not be a key
            validate.num_experts(num_experts, None)
        key = num_max, x.shape[1], num_topk, num_experts, x.dtype, cast
        if key not in self._shapes:
            self._shapes[key] = SlotShape(
                rank=self._rank,
                num_ranks=self._size,
                num_max=num_max,
                hidden=x.shape[1],
                num_topk=num_topk,
                dtype=x.dtype,
                dtype_code=ROW_DTYPES.index(x.dtype),
                cast=cast,
                placement=self._local.placement(num_experts),
            )
        return self._shapes[key]

    def _take(self, shape: SlotShape) -> Received:
        """Memory for what arrives. Rows and scales are the result whose life is watched."""
        num_local, num_slots, _ = shape.x_shape
        x_bytes = round_up(num_local * num_slots * shape.row_bytes, 64)
        array = self._results.take(x_bytes + num_local * num_slots * shape.scale_bytes)
        scales = None
        if shape.cast != NO_CAST:
            width = shape.scale_bytes // 4
            scales = _view(array, x_bytes, (num_local, num_slots, width), shape.scales_dtype)
        return Received(
            _view(array, 0, shape.x_shape, shape.row_dtype),
            scales,
            from_numpy(memory.empty_array(num_local, np.int32)),
            from_numpy(memory.empty_array((num_local, num_slots), np.int32)),
            from_numpy(memory.empty_array((num_local, self._size), np.int64)),
        )

    def _tokens(
        self, x: Any, topk_idx: Any, num_max: Any, num_experts: Any, fp8: Fp8
    ) -> tuple[Tensor, Tensor, SlotShape]:
        """What was given, checked: once for all tokens of one form, since it takes longer than to
        send a few.
        """
        key: tuple[Any, ...] | None = None
        shape = None
        with suppress(AttributeError, TypeError):  # no tensors, or no numbers
            key = _form(x), _form(topk_idx), num_max, num_experts, fp8
            shape = self._checked.get(key)
        if shape is None:
            cast = fp8.cast()
            x, topk_idx = self._check_tokens(x, topk_idx, num_max, cast)
            shape = self._shape(x, topk_idx.shape[1], num_max, num_experts, cast)
            if key is not None:
                self._checked[key] = shape
        return x.contiguous(), topk_idx.contiguous(), shape

    def _rows(
        self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any
    ) -> tuple[LowLatencyHandle, Tensor, Tensor, Tensor]:
        """As `_tokens`."""
        known = validate.low_latency_handle(handle, self._buffer_id)
        validate.require(
            known.receipt is None or known.receipt.is_over,
            f"handle is of dispatch call {known.number}, whose rows have not been received, want "
            "its hook called, or its event waited for, first",
        )
        forms = None
        with suppress(AttributeError):
            forms = _form(x), _form(topk_idx), _form(topk_weights)
        key = forms, known.shape, known.sent.shape
        if forms is None or key not in self._checked_back:
            x, topk_idx, topk_weights = self._check_rows(x, topk_idx, topk_weights, known)
            self._checked_back.add(key)
        return known, x.contiguous(), topk_idx.contiguous(), topk_weights.contiguous()

    def _check_tokens(
        self, x: Any, topk_idx: Any, num_max: Any, cast: int
    ) -> tuple[Tensor, Tensor]:
        x = validate.rows(
            "x", x, num_rows="tokens", dtypes=ROW_DTYPES if cast == NO_CAST else _CASTABLE
        )
        num_tokens, hidden = x.shape
        validate.integer("num_max_dispatch_tokens_per_rank", num_max, at_least=1)
        validate.require(
            num_tokens <= num_max,
            f"x has {num_tokens} tokens, want at most {num_max} (num_max_dispatch_tokens_per_rank)",
        )
        multiple = {NO_CAST: 1, PACKED: 4 * GROUP}.get(cast, GROUP)
        validate.require(
            hidden % multiple == 0,
            f"x has hidden size {hidden}, want a multiple of {multiple} in FP8",
        )
        return x, validate.topk_idx(topk_idx, num_tokens)

    def _check_rows(
        self, x: Any, topk_idx: Any, topk_weights: Any, known: LowLatencyHandle
    ) -> tuple[Tensor, Tensor, Tensor]:
        y = validate.tensor("x", x, shape=known.shape.x_shape, dtypes=validate.SUMMABLE)
        num_tokens, num_topk = known.sent.shape[1:]
        topk_idx = validate.topk_idx(topk_idx, num_tokens)
        validate.require(
            topk_idx.shape[1] == num_topk,
            f"topk_idx has top-k {topk_idx.shape[1]}, want {num_topk}, that of the dispatch",
        )
        return y, topk_idx, validate.topk_weights(topk_weights, topk_idx.shape)

    def _check_out(self, out: Any, num_tokens: int, y: Tensor) -> Tensor:
        if out is None:
            return memory.empty(num_tokens, y.shape[2], dtype=y.dtype)
        given = validate.tensor("out", out, shape=(num_tokens, y.shape[2]), dtypes=(y.dtype,))
        validate.require(given.is_contiguous(), "out is not contiguous, want it so")
        return out

    def _check_asked(self, asked: Asked) -> None:
        validate.require(
            not (asked.async_finish and asked.return_recv_hook),
            "async_finish and return_recv_hook are both True, want one at most",
        )
        if asked.waits is not None:
            _counters("wait_recv_cost_stats", asked.waits, self._size, torch.int64)


def _counters(what: str, value: Any, length: int, dtype: torch.dtype) -> Tensor:
    """Where a call adds to what is there."""
    value = validate.tensor(what, value, shape=[length], dtypes=(dtype,))
    validate.require(value.is_contiguous(), f"{what} is not contiguous, want it so")
    return value


def _view(array: np.ndarray, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Part of an array as a tensor, which keeps the array alive."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(array, dtype=dtype, count=count, offset=begin).view(shape)


def _bad_pair(topk_idx: Tensor, bad: int, shape: SlotShape) -> ValueError:
    if bad >= 0:
        return validate.bad_expert(topk_idx, bad, shape.placement.num_experts)
    token, k = divmod(-2 - bad, topk_idx.shape[1])
    expert = int(topk_idx[token, k])
    times = int((topk_idx[token] == expert).sum())
    return ValueError(f"topk_idx[{token}] names expert {expert} {times} times, want once at most")


def _unsent_pair(topk_idx: Tensor, place: int) -> ValueError:
    token, k = divmod(place, topk_idx.shape[1])
    return ValueError(
        f"topk_idx[{token}, {k}] is {int(topk_idx[token, k])}, want an expert that the token had "
        "in dispatch, or -1"
    )


def most_bytes(num_max: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Two blocks, and twice all rows that experts may have to give back, of two bytes an element.

    Half of it is for experts that write to get_next_low_latency_combine_buffer.

    >>> most_bytes(128, 7168, 8, 256)
    1884294784
    """
    for what, value in {
        "num_max_dispatch_tokens_per_rank": num_max,
        "hidden": hidden,
        "num_ranks": num_ranks,
        "num_experts": num_experts,
    }.items():
        validate.integer(what, value, at_least=1)
    local = -(-num_experts // num_ranks)
    block = num_max * (8 * num_experts + 2 * hidden)
    return round_up(2 * (block + 2 * local * num_ranks * num_max * 2 * hidden), 128)
