"""The roof: lines written past the cache, nothing read. No exchange of as many bytes is faster.

How a memcpy stands to it differs between processors: some write around the cache, some read a line
before they write it. So a dispatch is held to the roof, on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from tokenyard.wire.columns import LINE


@cache
def _writer() -> Callable[[int, int], None]:
    """Writes the lines between two addresses. Compiled at first use, in about half a second."""
    from llvmlite import ir
    from numba import njit, types
    from numba.extending import intrinsic

    line = ir.VectorType(ir.IntType(64), LINE // 8)

    @intrinsic
    def store(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            at = builder.inttoptr(args[0], line.as_pointer())
            stored = builder.store(ir.Constant(line, [1] * (LINE // 8)), at, align=LINE)
            stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
            return context.get_dummy_value()

        return types.void(types.int64), generate

    @njit([types.void(types.int64, types.int64)], nogil=True)
    def write(begin: Any, end: Any) -> None:
        at = (begin + LINE - 1) // LINE * LINE
        while at + LINE <= end:
            store(at)
            at += LINE

    return write


def roof(target: Tensor) -> Callable[[], None]:
    """A call that overwrites all whole lines of a contiguous tensor."""
    write = _writer()

    def call() -> None:  # holds the tensor, so that its memory stays
        begin = target.data_ptr()
        write(begin, begin + target.nbytes)

    return call
