"""The checks of what low-latency calls are given: tensors like earlier ones pass at one look."""

from __future__ import annotations

from itertools import product
from operator import is_
from typing import Any

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.inputs import Preparation
from tokenyard.low_latency.handle import LowLatencyHandle
from tokenyard.runtime.completion import Completion
from tokenyard.types import ROW_DTYPES, round_up
from tokenyard.validate.alike import Like, like, like_none
from tokenyard.wire.fp8 import GROUP, NO_CAST, PACKED, PLAIN, ROUNDED
from tokenyard.wire.slots import SlotShape

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


class Inputs:
    """The checks of one Buffer's calls, and the shapes that it has seen."""

    def __init__(
        self, local: Preparation, rank: int, size: int, buffer_id: int, num_bytes: int
    ) -> None:
        self._local, self._rank, self._size = local, rank, size
        self._buffer_id, self._num_bytes = buffer_id, num_bytes
        self._shapes: dict[tuple[Any, ...], SlotShape] = {}
        # What tensors of calls were like that were checked, and could be read as they are.
        self._given: dict[tuple[Any, ...], tuple[Like, SlotShape]] = {}
        self._back: dict[tuple[SlotShape, int], Like] = {}

    def forget(self) -> None:
        """Check all shapes anew: the placement has changed."""
        self._shapes.clear()
        self._given.clear()
        self._back.clear()

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
        given = self._local.given_placement
        if given is not None and handle.shape.placement is not given:
            raise ValueError(
                f"handle is of dispatch call {handle.number}, before the Buffer was rebalanced, "
                "want one of a dispatch since then"
            )
        return handle

    def tokens(
        self, x: Any, topk_idx: Any, num_max: Any, num_experts: Any, fp8: Fp8
    ) -> tuple[Tensor, Tensor, SlotShape]:
        """Tensors like those of a call before need no more than this look."""
        try:
            is_like, known = self._given[x.shape[0], num_max, num_experts, fp8]
            if is_like(x, topk_idx) and x.data_ptr() and topk_idx.data_ptr():
                return x, topk_idx, known
        except (AttributeError, IndexError, KeyError, TypeError):  # no such call, or no tensors
            pass
        use_fp8, rounds, packs = map(bool, fp8)
        validate.require(
            rounds or not (use_fp8 and packs),
            "use_ue8m0 is True with round_scale=False, want round_scale=True",
        )
        cast = _CASTS[use_fp8, rounds, packs]
        plain, ids = self._check_tokens(x, topk_idx, num_max, cast)
        shape = self._shape(plain, ids.shape[1], num_max, num_experts, cast)
        if plain is x and ids is topk_idx:
            if len(self._given) >= _MOST_KNOWN:
                self._given.clear()
            self._given[len(x), num_max, num_experts, fp8] = like(x, topk_idx), shape
        return plain, ids, shape

    def rows(
        self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any
    ) -> tuple[LowLatencyHandle, Tensor, Tensor, Tensor]:
        known = self.known(handle)
        if known.hook is not None and not known.hook.is_over:
            raise ValueError(
                f"handle is of dispatch call {known.number}, whose rows have not been received, "
                "want its hook called, or its event waited for, first"
            )
        key = known.shape, known.num_tokens
        is_like = self._back.get(key, like_none)(x, topk_idx, topk_weights)
        if is_like and x.data_ptr() and topk_idx.data_ptr() and topk_weights.data_ptr():
            return known, x, topk_idx, topk_weights
        plain = self._check_rows(x, topk_idx, topk_weights, known)
        if all(map(is_, plain, (x, topk_idx, topk_weights))):
            if len(self._back) >= _MOST_KNOWN:
                self._back.clear()
            self._back[key] = like(*plain)
        return known, *plain

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
        shape = known.shape
        self._fits(shape.num_max, shape.hidden, shape.placement.num_experts, y.element_size())
        num_topk = shape.num_topk
        topk_idx = validate.topk_idx(topk_idx, known.num_tokens)
        validate.require(
            topk_idx.shape[1] == num_topk,
            f"topk_idx has top-k {topk_idx.shape[1]}, want {num_topk}, that of the dispatch",
        )
        return y.contiguous(), topk_idx, validate.topk_weights(topk_weights, topk_idx.shape)

    def completion(self, completion: Completion) -> None:
        validate.require(
            not (completion.async_finish and completion.return_recv_hook),
            "async_finish and return_recv_hook are both True, want one at most",
        )
        if completion.waits is not None:
            counters("wait_recv_cost_stats", completion.waits, self._size, torch.int64)

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
            placement = self._local.placement(num_experts)
            self._fits(num_max, x.shape[1], placement.num_experts, x.element_size())
            self._shapes[key] = SlotShape(
                rank=self._rank,
                num_ranks=self._size,
                num_max=num_max,
                hidden=x.shape[1],
                num_topk=num_topk,
                dtype=x.dtype,
                dtype_code=ROW_DTYPES.index(x.dtype),
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


def counters(what: str, value: Any, length: int, dtype: torch.dtype) -> Tensor:
    """Check a user's counters, to which a call adds."""
    value = validate.target(what, value, shape=[length], dtypes=(dtype,))
    validate.require(value.is_contiguous(), f"{what} is not contiguous, want it so")
    return value


def bad_pair(topk_idx: Tensor, bad: int, shape: SlotShape) -> ValueError:
    if bad >= 0:
        return validate.bad_expert(topk_idx, bad, shape.placement.num_experts)
    token, k = divmod(-2 - bad, topk_idx.shape[1])
    expert = int(topk_idx[token, k])
    times = int((topk_idx[token] == expert).sum())
    return ValueError(f"topk_idx[{token}] names expert {expert} {times} times, want once at most")


def unsent_pair(topk_idx: Tensor, place: int) -> ValueError:
    token, k = divmod(place, topk_idx.shape[1])
    return ValueError(
        f"topk_idx[{token}, {k}] is {int(topk_idx[token, k])}, want an expert that the token had "
        "in dispatch, or -1"
    )
