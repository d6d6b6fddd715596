"""Streaming stores are fenced by the thread that made them, read in the compiler's output.

A streaming store may become visible after a later signal, of this thread or of one that it wakes.
So no kernel returns with such a store behind it that was not fenced, and no signal that stands for
written rows is raised then. Followed through all branches and calls of the generated code.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest
from numba import njit
from numba.core.extending import _Intrinsic
from numba.extending import is_jitted

from tests.cases.kernel_code import OWN_ROWS, SIGNALS, STREAM, Flow, functions, modules
from tests.cases.lanes import at_night

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="reads code of x86-64 and of ARM64"
)

# A ring's count of records taken. Loads are never late, whatever else this thread streamed.
READ = {"ring.protocol.take"}


def flow(name: str, signature: tuple[Any, ...]) -> tuple[Flow, str]:
    compiled = njit(nogil=True)(functions()[name].py_func)
    compiled.compile(signature)
    return Flow(compiled.inspect_llvm(signature)), compiled.overloads[signature].fndesc.mangled_name


def used(function: FunctionType) -> dict[str, Any]:
    """The global objects that a function names."""

    def names(code: CodeType) -> Iterator[str]:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from names(constant)

    known = function.__globals__
    return {name: known[name] for name in names(function.__code__) if name in known}


def streams(name: str, value: Any) -> bool:
    if isinstance(value, _Intrinsic):
        return "stream" in name
    return is_jitted(value) and any(streams(*one) for one in used(value.py_func).items())


def test_all_kernels_that_stream_are_looked_at() -> None:
    called = {
        id(value)
        for module in modules()
        for function in vars(module).values()
        if isinstance(function, FunctionType)
        for name, value in used(function).items()
        if streams(name, value)
    }
    assert {name for name, value in functions().items() if id(value) in called} == set(STREAM)


# The ring's are those of other transports, in other loops, and take longest to compile.
@pytest.mark.parametrize(
    "name", at_night(STREAM, gate=[name for name in STREAM if not name.startswith("ring.")])
)
def test_no_kernel_returns_before_its_streaming_stores_are_fenced(name: str) -> None:
    code, kernel = flow(name, STREAM[name])
    assert not code.leaves_dirty(kernel, False)


def test_all_ways_to_raise_a_signal_are_looked_at() -> None:
    raising = {
        name for name, value in functions().items() if "store_release" in used(value.py_func)
    }
    assert raising == {*SIGNALS, *OWN_ROWS, *READ}


@pytest.mark.parametrize("name", SIGNALS)
def test_signals_for_what_was_written_come_after_a_fence(name: str) -> None:
    code, function = flow(name, SIGNALS[name])
    assert not code.leaves_dirty(function, True)
    assert (code.signals > 0, code.dirty_signals) == (True, 0)


@pytest.mark.parametrize("name", OWN_ROWS)
def test_signals_for_rows_come_after_ordinary_stores(name: str) -> None:
    code, function = flow(name, OWN_ROWS[name])
    assert not code.leaves_dirty(function, False)
    assert (code.signals > 0, code.dirty_signals) == (True, 0)
