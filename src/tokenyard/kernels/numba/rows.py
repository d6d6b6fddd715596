"""Moving rows of bytes by index, and renaming the experts in them."""

from __future__ import annotations

import numpy as np
from numba import njit
from torch import Tensor

from tokenyard.kernels.numba.atomics import LINE, stream_line
from tokenyard.kernels.numba.intrinsics import copy_bytes, pointer
from tokenyard.kernels.numba.threads import in_channels
from tokenyard.types import Route

# Streaming stores pay for long rows, if all of them are too much to be read again from the cache.
_LONG_ROW = 1024
_MUCH = 1 << 20

_INT32 = np.empty(0, np.int32)
_INT64 = np.empty(0, np.int64)
_FLOAT32 = np.empty(0, np.float32)


def pays_streaming(num_rows: int, num_bytes: int) -> bool:
    return num_bytes >= _LONG_ROW and num_rows * num_bytes >= _MUCH


@njit(nogil=True, cache=True)
def copy_row(target, source, num_bytes):
    """Whole lines by streaming stores, the ends the ordinary way."""
    head = min((-target) % LINE, num_bytes)
    if head > 0:
        copy_bytes(target, source, head)
    lines = (num_bytes - head) // LINE
    for i in range(lines):
        stream_line(target + head + i * LINE, source + head + i * LINE)
    done = head + lines * LINE
    if done < num_bytes:
        copy_bytes(target + done, source + done, num_bytes - done)


@njit(nogil=True, cache=True)
def _pack_kernel(x, x_stride, index, out, out_stride, num_bytes, begin, end, streaming):
    tokens = pointer(index, _INT32)
    for n in range(begin, end):
        token = np.int64(tokens[n]) if index != 0 else np.int64(n)
        target, source = out + np.int64(n) * out_stride, x + token * x_stride
        if streaming:
            copy_row(target, source, num_bytes)
        else:
            copy_bytes(target, source, num_bytes)


def pack(x_TB: Tensor, index_N: Tensor | None, out_NB: Tensor) -> Tensor:
    num_rows, num_bytes = out_NB.shape
    index = 0 if index_N is None else index_N.data_ptr()
    x, x_stride = x_TB.data_ptr(), x_TB.stride(0)
    out, out_stride = out_NB.data_ptr(), out_NB.stride(0)

    streaming = pays_streaming(num_rows, num_bytes)

    def part(begin: int, end: int) -> None:
        _pack_kernel(x, x_stride, index, out, out_stride, num_bytes, begin, end, streaming)

    if num_rows:
        in_channels(part, num_rows, num_rows * num_bytes)
    return out_NB


@njit(nogil=True, cache=True)
def _scatter_kernel(x, x_stride, starts, ranks, slots, bases, num_bytes, begin, end, streaming):
    first, to, at = pointer(starts, _INT32), pointer(ranks, _INT32), pointer(slots, _INT32)
    for t in range(begin, end):
        row = x + np.int64(t) * x_stride
        for c in range(first[t], first[t + 1]):
            target = bases[to[c]] + np.int64(at[c]) * num_bytes
            if streaming:
                copy_row(target, row, num_bytes)
            else:
                copy_bytes(target, row, num_bytes)


def scatter(x_TB: Tensor, route: Route, bases: np.ndarray) -> None:
    """Each token's row into its slot of each of its ranks' rows: read once, written to all.

    `bases` has the address of this rank's first row in each rank's memory.
    """
    num_tokens, num_bytes = x_TB.shape
    starts, ranks = route.copy_start.data_ptr(), route.copy_rank.data_ptr()
    slots, x, stride = route.copy_slot.data_ptr(), x_TB.data_ptr(), x_TB.stride(0)

    moved = route.copy_rank.shape[0] * num_bytes
    streaming = pays_streaming(route.copy_rank.shape[0], num_bytes)

    def part(begin: int, end: int) -> None:
        _scatter_kernel(x, stride, starts, ranks, slots, bases, num_bytes, begin, end, streaming)

    if num_tokens:
        in_channels(part, num_tokens, moved)


@njit(nogil=True, cache=True)
def _localise_kernel(topk_idx, topk_weights, table, num_pairs, num_experts):
    ids = pointer(topk_idx, _INT64)
    weights = pointer(topk_weights, _FLOAT32)
    local = pointer(table, _INT64)
    for i in range(num_pairs):
        expert = ids[i]
        here = local[expert] if 0 <= expert < num_experts else -1
        ids[i] = here
        if here < 0 and topk_weights != 0:
            weights[i] = 0.0


def localise(
    topk_idx_NK: Tensor, topk_weights_NK: Tensor | None, local_of_expert_E: Tensor
) -> None:
    _localise_kernel(
        topk_idx_NK.data_ptr(),
        0 if topk_weights_NK is None else topk_weights_NK.data_ptr(),
        local_of_expert_E.data_ptr(),
        topk_idx_NK.numel(),
        local_of_expert_E.shape[0],
    )
