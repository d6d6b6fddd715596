"""What Numba has no word for: typed pointers from addresses, and copies of bytes.

Kernels take addresses (`tensor.data_ptr()`) rather than arrays: an array costs a call three times
what a number does, besides making it of a tensor, and torch has dtypes that numpy lacks. A `like`
argument is an empty array whose dtype says how to read memory; Numba has no half floats on CPU, so
uint16 stands for bfloat16 and int16 for float16, which is safe because no integers are ever summed.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from tokenyard.kernels.numba.llvm import vectors

# How `pointer` is told to read memory.
UINT8, INT32, INT64, UINT64 = (np.empty(0, t) for t in (np.uint8, np.int32, np.int64, np.uint64))
FLOAT32, FLOAT64 = np.empty(0, np.float32), np.empty(0, np.float64)

# The same by the dtype of rows. One compiled kernel serves each of these.
LIKE: dict[torch.dtype, np.ndarray] = {
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
    torch.float32: FLOAT32,
    torch.float64: FLOAT64,
}

LANES = vectors.LANES


@intrinsic
def pointer(typingctx, address, like):
    """address -> a pointer to elements of like's dtype."""
    sig = types.CPointer(like.dtype)(types.int64, like)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return sig, codegen


@intrinsic
def copy_bytes(typingctx, target, source, count):
    """libc's memcpy of `count` bytes between two addresses."""
    sig = types.void(types.int64, types.int64, types.int64)

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        flag = ir.IntType(1)
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [byte, byte, ir.IntType(64)])
        target, source = (builder.inttoptr(arg, byte) for arg in args[:2])
        builder.call(memcpy, [target, source, args[2], flag(0)])
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def trailing_zeros(typingctx, word):
    """The index of the lowest set bit of a uint64 that is not 0."""
    sig = types.uint64(types.uint64)

    def codegen(context, builder, signature, args):
        # The 1 leaves the result for 0 undefined, so that no test for 0 is compiled.
        return builder.cttz(args[0], ir.IntType(1)(1))

    return sig, codegen
