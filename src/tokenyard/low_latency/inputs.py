"""The checks of what low-latency calls are given: tensors like earlier ones pass at one look."""

from __future__ import annotations

from itertools import product
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.core import Core
from tokenyard.kernels import Kernels
from tokenyard.low_latency import logfmt
from tokenyard.low_latency.handle import LowLatencyHandle
from tokenyard.low_latency.shape import SlotShape
from tokenyard.runtime import memory
from tokenyard.runtime.completion import AT_ONCE, Completion
from tokenyard.types import ROW_DTYPES, round_up
from tokenyard.validate.alike import Like, like, like_none
from tokenyard.wire.fp8 import GROUP, NO_CAST, PACKED, PLAIN, ROUNDED

_WORDS = 1 << 16  # bytes of control segments, and of rounding to pages
_MOST_KNOWN = 1024  # kinds of tensors
_CASTABLE = (torch.bfloat16, torch.float16, torch.float32)


# How rows are to be cast: use_fp8, round_scale and use_ue8m0, as DeepEP says it.
Fp8 = tuple[bool, bool, bool]
_CASTS: dict[Fp8, int] = {
    **dict.fromkeys(product((False,), (False, True), (False, True)), NO_CAST),
    (True, False, False): PLAIN,
    (True, True, False): ROUNDED,
    (True, True, True): PACKED,
}


class Tokens(NamedTuple):
    """What a dispatch was given, checked."""

    x: Tensor
    topk_idx: Tensor
    shape: SlotShape
    totals: Tensor | None  # to which counts are added
    completion: Completion


class Rows(NamedTuple):
    """What a combine was given, checked."""

    y: Tensor  # [L, S, D]
    topk_idx: Tensor
    weights: Tensor
    handle: LowLatencyHandle
    zero_copy: bool
    out: Tensor | None  # the user's; with LogFMT, sums are rounded into it
    completion: Completion


class Inputs:
    """The checks of one Buffer's calls, and the shapes that it has seen."""

    def __init__(self, engine: Core, kernels: Kernels, num_bytes: int) -> None:
        """`num_bytes` is what calls may need at most, 0 for no bound."""
        self.local, self._kernels, self._num_bytes = engine.local, kernels, num_bytes
        self._rank, self._size = engine.rank, engine.num_ranks
        self._buffer_id = engine.buffer_id
        self._shapes: dict[tuple[Any, ...], SlotShape] = {}
        # What tensors of calls were like that were checked, and could be read as they are.
        self._given: dict[tuple[Any, ...], tuple[Like, SlotShape]] = {}
        self._back: dict[tuple[SlotShape, int], Like] = {}

    def forget(self) -> None:
        """Check all shapes anew: the placement has changed."""
        self._shapes.clear()
        self._given.clear()
        self._back.clear()

    def is_shared(self, y: Tensor) -> bool:
        """Whether y lies where a combine need not copy it."""
        raise NotImplementedError

    def known(self, handle: Any) -> LowLatencyHandle:
        """The handle that a user gave, of this Buffer and of where experts live now."""
        if not isinstance(handle, LowLatencyHandle):
            raise ValueError(
                f"handle is {validate.kind(handle)}, want the handle that low_latency_dispatch "
                "returned"
            )
        if handle.buffer_id != self._buffer_id:
            raise ValueError(
                f"handle is of dispatch call {handle.number} on another Buffer or rank, want one "
                "that this Buffer's low_latency_dispatch returned here"
            )
        given = self.local.given_placement
        if given is not None and handle.shape.placement is not given:
            raise ValueError(
                f"handle is of dispatch call {handle.number}, before the Buffer was rebalanced, "
                "want one of a dispatch since then"
            )
        return handle

    def tokens(
        self,
        completion: Completion,
        x: Any,
        topk_idx: Any,
        num_max: Any,
        num_experts: Any,
        totals: Any,
        fp8: Fp8,
    ) -> Tokens:
        """Tensors like those of a call before need no more than a look."""
        if completion is not AT_ONCE:
            self._check_completion(completion)
        shape = None
        try:
            is_like, shape = self._given[x.shape[0], num_max, num_experts, fp8]
            if not (is_like(x, topk_idx) and x.data_ptr() and topk_idx.data_ptr()):
                shape = None
        except (AttributeError, IndexError, KeyError, TypeError):  # no such call, or no tensors
            pass
        if shape is None:
            x, topk_idx, shape = self._check_tokens(x, topk_idx, num_max, num_experts, fp8)
        if totals is not None:
            what = "cumulative_local_expert_recv_stats"
            totals = _counters(what, totals, shape.num_local, torch.int32)
        return Tokens(x, topk_idx, shape, totals, completion)

    def rows(
        self,
        completion: Completion,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: Any,
        use_logfmt: bool,
        zero_copy: bool,
        out: Any,
    ) -> Rows:
        if completion is not AT_ONCE:
            self._check_completion(completion)
        known = self.known(handle)
        if known.hook is not None and not known.hook.is_over:
            raise ValueError(
                f"handle is of dispatch call {known.number}, whose rows have not been received, "
                "want its hook called, or its event waited for, first"
            )
        key, y, idx, weights = (known.shape, known.num_tokens), x, topk_idx, topk_weights
        is_like = self._back.get(key, like_none)(y, idx, weights)
        if not (is_like and y.data_ptr() and idx.data_ptr() and weights.data_ptr()):
            y, idx, weights = plain = self._check_rows(x, topk_idx, topk_weights, known)
            if all(map(is_, plain, (x, topk_idx, topk_weights))):
                if len(self._back) >= _MOST_KNOWN:
                    self._back.clear()
                self._back[key] = like(*plain)
        if out is not None:
            validate.out(out, known.num_tokens, y)
        if use_logfmt:
            logfmt.check(y, zero_copy)
            if out is None:
                out = memory.empty(known.num_tokens, known.shape.hidden, dtype=y.dtype)
            y = logfmt.cast(self._kernels, y, known)
        if zero_copy:
            y = self._lent(known, y)
        return Rows(y, idx, weights, known, zero_copy, out, completion)

    def _lent(self, known: LowLatencyHandle, y: Tensor) -> Tensor:
        """What a zero_copy combine sends: y if it is a buffer of this handle, else the last buffer
        that was given for the handle. As in DeepEP, y then only has the shape.
        """
        if known.lent:
            is_one = any(y.data_ptr() == one.data_ptr() for one in known.lent)
            return y if is_one else known.lent[-1]
        validate.require(
            self.is_shared(y),
            "x is not the tensor of get_next_low_latency_combine_buffer, want that, or another x "
            "after that tensor was filled, with zero_copy=True",
        )
        return y

    def _check_tokens(
        self, given: Any, topk_idx: Any, num_max: Any, num_experts: Any, fp8: Fp8
    ) -> tuple[Tensor, Tensor, SlotShape]:
        use_fp8, rounds, packs = map(bool, fp8)
        validate.require(
            rounds or not (use_fp8 and packs),
            "use_ue8m0 is True with round_scale=False, want round_scale=True",
        )
        cast = _CASTS[use_fp8, rounds, packs]
        x = validate.rows(
            "x", given, num_rows="tokens", dtypes=ROW_DTYPES if cast == NO_CAST else _CASTABLE
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
        ids = validate.topk_idx(topk_idx, num_tokens)
        shape = self._shape(x, ids.shape[1], num_max, num_experts, cast)
        if x is given and ids is topk_idx:
            if len(self._given) >= _MOST_KNOWN:
                self._given.clear()
            self._given[num_tokens, num_max, num_experts, fp8] = like(x, topk_idx), shape
        return x, ids, shape

    def _check_rows(
        self, x: Any, topk_idx: Any, topk_weights: Any, known: LowLatencyHandle
    ) -> tuple[Tensor, Tensor, Tensor]:
        y = validate.tensor("x", x, shape=known.shape.x_shape, dtypes=validate.SUMMABLE)
        shape = known.shape
        self._fits(shape.num_max, shape.hidden, shape.placement.num_experts, y.element_size())
        num_topk = shape.num_topk
        topk_idx = validate.topk_idx(topk_idx, known.num_tokens)
        validate.require(
            topk_idx.shape[1] == num_topk,
            f"topk_idx has top-k {topk_idx.shape[1]}, want {num_topk}, that of the dispatch",
        )
        return y.contiguous(), topk_idx, validate.topk_weights(topk_weights, topk_idx.shape)

    def _check_completion(self, completion: Completion) -> None:
        validate.require(
            not (completion.async_finish and completion.return_recv_hook),
            "async_finish and return_recv_hook are both True, want one at most",
        )
        if completion.waits is not None:
            _counters("wait_recv_cost_stats", completion.waits, self._size, torch.int64)

    def _fits(self, num_max: int, hidden: int, num_experts: int, itemsize: int) -> None:
        if not self._num_bytes:
            return
        needed = most_bytes(num_max, hidden, self._size, num_experts, max(itemsize, 2))
        validate.require(
            needed <= self._num_bytes,
            f"num_rdma_bytes is {self._num_bytes}, want at least {needed}, as "
            "get_low_latency_rdma_size_hint says"
            + f" for two bytes an element, here {itemsize}" * (itemsize > 2)
            + ", or 0 for no bound",
        )

    def _shape(
        self, x: Tensor, num_topk: int, num_max: int, num_experts: Any, cast: int
    ) -> SlotShape:
        if type(num_experts) is not int:  # and so may not be a key
            validate.num_experts(num_experts, None)
        key = num_max, x.shape[1], num_topk, num_experts, x.dtype, cast
        if key not in self._shapes:
            placement = self.local.placement(num_experts)
            self._fits(num_max, x.shape[1], placement.num_experts, x.element_size())
            self._shapes[key] = SlotShape(
                rank=self._rank,
                num_ranks=self._size,
                num_max=num_max,
                hidden=x.shape[1],
                num_topk=num_topk,
                dtype=x.dtype,
                cast=cast,
                placement=placement,
            )
        return self._shapes[key]


def most_bytes(
    num_max: int, hidden: int, num_ranks: int, num_experts: int, itemsize: int = 2
) -> int:
    """Two blocks, and twice all rows that experts may have to give back, of so many bytes an
    element; and what words take, and rounding to pages.

    Half of it is for experts that write to get_next_low_latency_combine_buffer.

    >>> most_bytes(128, 7168, 8, 256)
    1883308032
    """
    for what, value in {
        "num_max_dispatch_tokens_per_rank": num_max,
        "hidden": hidden,
        "num_ranks": num_ranks,
        "num_experts": num_experts,
    }.items():
        validate.integer(what, value, at_least=1)
    local = -(-num_experts // num_ranks)
    block = num_max * (8 * num_experts + itemsize * hidden)
    rows = local * num_ranks * num_max * itemsize * hidden
    return round_up(2 * (block + 2 * rows), 128) + _WORDS


def _counters(what: str, value: Any, length: int, dtype: torch.dtype) -> Tensor:
    """Check a user's counters, to which a call adds."""
    value = validate.target(what, value, shape=[length], dtypes=(dtype,))
    validate.require(value.is_contiguous(), f"{what} is not contiguous, want it so")
    return value


def repeated_pair(topk_idx: Tensor, place: int) -> ValueError:
    token, k = divmod(place, topk_idx.shape[1])
    expert = int(topk_idx[token, k])
    times = int((topk_idx[token] == expert).sum())
    return ValueError(f"topk_idx[{token}] names expert {expert} {times} times, want once at most")


def unsent_pair(topk_idx: Tensor, place: int) -> ValueError:
    token, k = divmod(place, topk_idx.shape[1])
    return ValueError(
        f"topk_idx[{token}, {k}] is {int(topk_idx[token, k])}, want an expert that the token had "
        "in dispatch, or -1"
    )
