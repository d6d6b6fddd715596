"""The clock of the machine, inside compiled code: that of `time.monotonic_ns`."""

from __future__ import annotations

import time

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_CLOCK = getattr(time, "CLOCK_MONOTONIC", 1)
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_MOMENT = ir.ArrayType(_I64, 2)  # a timespec: seconds, nanoseconds


@intrinsic
def now(typingctx):
    """Nanoseconds: libc's clock_gettime, some 20 ns without a system call."""

    def codegen(context, builder, signature, args):
        moment = cgutils.alloca_once(builder, _MOMENT)
        kind = ir.FunctionType(_I32, [_I32, _MOMENT.as_pointer()])
        read = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(read, [_I32(_CLOCK), moment])
        seconds = builder.load(cgutils.gep_inbounds(builder, moment, 0, 0))
        rest = builder.load(cgutils.gep_inbounds(builder, moment, 0, 1))
        return builder.add(builder.mul(seconds, _I64(10**9)), rest)

    return types.int64(), codegen
