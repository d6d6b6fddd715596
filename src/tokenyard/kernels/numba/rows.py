"""Moving rows of bytes by index, and renaming the experts in them."""

from __future__ import annotations

import numpy as np
from numba import njit
from torch import Tensor

from tokenyard.kernels.numba.intrinsics import copy_bytes, pointer
from tokenyard.kernels.numba.threads import in_channels

_INT32 = np.empty(0, np.int32)
_INT64 = np.empty(0, np.int64)
_FLOAT32 = np.empty(0, np.float32)


@njit(nogil=True, cache=True)
def _pack_kernel(x, x_stride, index, out, out_stride, num_bytes, begin, end):
    if index == 0:
        for n in range(begin, end):
            copy_bytes(out + n * out_stride, x + n * x_stride, num_bytes)
        return
    tokens = pointer(index, _INT32)
    for n in range(begin, end):
        token = np.int64(tokens[n])
        copy_bytes(out + n * out_stride, x + token * x_stride, num_bytes)


def pack(x_TB: Tensor, index_N: Tensor | None, out_NB: Tensor) -> Tensor:
    num_rows, num_bytes = out_NB.shape
    index = 0 if index_N is None else index_N.data_ptr()
    x, x_stride = x_TB.data_ptr(), x_TB.stride(0)
    out, out_stride = out_NB.data_ptr(), out_NB.stride(0)

    def part(begin: int, end: int) -> None:
        _pack_kernel(x, x_stride, index, out, out_stride, num_bytes, begin, end)

    if num_rows:
        in_channels(part, num_rows, num_rows * num_bytes)
    return out_NB


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
