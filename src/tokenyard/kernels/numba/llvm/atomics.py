"""What ranks that share memory need of the machine: signals that order, waits that pause, stores
that pass the cache by.

A thread that reads a word with `load_acquire` sees all that the thread which wrote it with
`store_release` had written before, but for streaming stores. So a kernel that streams fences
(`fence_stores`) before it returns, on every thread that streamed, since another thread may raise
the signal. So does one that tells the function which it calls not to stream: whether the compiler
takes that function in, and leaves its other half out, depends on the processor. A fence with
nothing to wait for costs a few nanoseconds. Signals are raised by `signals.raise_signal` alone; the
rings have counters of their own.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from tokenyard.wire.columns import LINE

_MACHINE = platform.machine().lower()
_IS_X86, _IS_ARM = _MACHINE in ("x86_64", "amd64"), _MACHINE in ("aarch64", "arm64")
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_I64, LINE // 8)
_WHOLE_SYSTEM = 15  # the only kind of `isb` that there is


def _instruct(builder: Any, name: Any, *operands: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [one.type for one in operands])
    builder.call(builder.module.declare_intrinsic(name, (), kind), operands)


@intrinsic
def load_acquire(typingctx, address):
    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx, address, value):
    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fence_stores(typingctx):
    """All stores so far, streaming ones too, come before all stores from here on.

    On ARM that is `dmb ish`, which streaming stores (`stnp`) obey as others do.
    """

    def codegen(context, builder, signature, args):
        if _IS_X86:
            _instruct(builder, "llvm.x86.sse.sfence")
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def pause(typingctx):
    """Tell the core that this is a loop that waits.

    On ARM that is `isb`, as in Rust and PostgreSQL: it holds up a core about as long as x86's
    pause does, and `yield` does nothing on cores that run one thread.
    """

    def codegen(context, builder, signature, args):
        if _IS_X86:
            _instruct(builder, "llvm.x86.sse2.pause")
        elif _IS_ARM:
            _instruct(builder, "llvm.aarch64.isb", ir.IntType(32)(_WHOLE_SYSTEM))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typingctx):
    """Let another thread have the core: libc's sched_yield."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def prefetch(typingctx, address):
    """Read a line into the cache, soon; the address may be of no memory at all."""

    def codegen(context, builder, signature, args):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        # For reading, into all caches, data.
        builder.call(function, [builder.inttoptr(args[0], byte), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def stream_line(typingctx, target, source):
    """Copy a line to a multiple of 64, without reading what it overwrites into the cache."""

    def codegen(context, builder, signature, args):
        target, source = (builder.inttoptr(arg, _VECTOR.as_pointer()) for arg in args)
        # x86 streams only to aligned addresses; the source may lie anywhere.
        store = builder.store(builder.load(source, align=1), target, align=LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
