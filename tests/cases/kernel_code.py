"""Compiled functions of the numba set by name, how Python calls them, and their code in LLVM.

Read by tests of what the compiler made of them, for this machine and for others.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Any

from numba import typeof, types
from numba.extending import is_jitted

from tokenyard.kernels import numba as kernels
from tokenyard.kernels.numba.ring.combine import _Sum
from tokenyard.kernels.numba.ring.protocol import RingCall

I64, FLAG = types.int64, types.boolean
BFLOAT16, WIDE = types.uint16[::1], types.float32[::1]
WORDS, TABLE = types.int64[::1], types.int64[:, ::1]
CALL = typeof(RingCall(*[0] * 12))
SUMS = typeof(_Sum(*[0] * 10, False, 0, 0))  # type: ignore[call-arg, arg-type]

# Kernels in which something may be streamed, as Python calls them.
STREAM = {
    "between_nodes.combine._add_up_kernel": (BFLOAT16, WIDE, I64, I64),
    "between_nodes.combine._sum_for_kernel": (BFLOAT16, WIDE, I64, I64),
    "call.by_expert._dispatch_kernel": (I64,),
    "call.by_expert._take_kernel": (I64,) * 3,
    "call.by_source._dispatch_kernel": (I64,),
    "call.by_source._write_kernel": (I64,) * 3,
    "call.slot_sums._combine_kernel": (BFLOAT16, WIDE, I64),
    "call.slots._dispatch_kernel": (BFLOAT16, I64),
    "call.sums._combine_kernel": (BFLOAT16, WIDE, I64),
    "call.sums._sum_kernel": (BFLOAT16, WIDE, *(I64,) * 4),
    "permute._spread_kernel": (I64,) * 9 + (FLAG,),
    "permute._unpermute_kernel": (I64,) * 9 + (FLAG, BFLOAT16, WIDE),
    "permute_backward._unpermute_backward_kernel": (I64,) * 3 + (BFLOAT16, WIDE),
    "quantize._from_fp8_kernel": (I64,) * 6,
    "quantize.to_fp8_groups": (I64,) * 6 + (BFLOAT16,),
    "rearrange.boxes._rearrange_kernel": (I64,) * 6 + (BFLOAT16,),
    "reduce._reduce_kernel": (WORDS, types.int32[::1], *(I64,) * 7, FLAG, BFLOAT16, WIDE),
    "ring.combine._combine_kernel": (CALL, SUMS, TABLE, I64, I64, I64, BFLOAT16, WIDE, WIDE),
    "ring.dispatch._dispatch_kernel": (CALL, WORDS, WORDS, I64, I64, I64),
    "rows._pack_kernel": (I64,) * 8 + (FLAG,),
    "rows._scatter_kernel": (TABLE, *(WORDS,) * 4, I64, I64, FLAG),
}

# The ways to raise a signal, whatever this thread did before.
SIGNALS = {"signals.raise_signal": (I64,) * 2, "signals.raise_signals": (I64,) * 3}
# A ring's count of records written: their rows are read again at once, and not streamed.
OWN_ROWS = {"ring.protocol.send": (CALL, I64, I64)}
WAIT = {"signals.reaches": (I64,) * 3}
SIGNATURES: dict[str, tuple[Any, ...]] = {**STREAM, **SIGNALS, **OWN_ROWS, **WAIT}


def modules() -> list[Any]:
    found = pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")
    return [importlib.import_module(info.name) for info in found]


def functions() -> dict[str, Any]:
    """All compiled functions, by file and name."""
    return {
        f"{module.__name__.removeprefix(f'{kernels.__name__}.')}.{name}": value
        for module in modules()
        for name, value in vars(module).items()
        if is_jitted(value) and value.py_func.__module__ == module.__name__
    }


class Flow:
    """What code does to a thread that may have streamed without a fence: that is dirty."""

    def __init__(self, llvm: str) -> None:
        self._code: dict[str, dict[str, list[str]]] = {}  # instructions by function and block
        for name, body in re.findall(r"^define .*?@([^(]+)\(.*?^\{?(.*?)^}", llvm, re.M | re.S):
            parts = re.split(r"^([^\s:]+):.*\n", body.split("{\n", 1)[-1], flags=re.M)
            code = {
                "": parts[0].splitlines(),
                **dict(zip(parts[1::2], map(str.splitlines, parts[2::2]))),
            }
            self._code[name] = {label: lines for label, lines in code.items() if lines}
        self._known: dict[tuple[str, bool], bool] = {}
        self.signals = self.dirty_signals = 0

    def leaves_dirty(self, name: str, dirty: bool) -> bool:
        """Whether a thread may be dirty when the function of this name returns."""
        if (name, dirty) in self._known:
            return self._known[name, dirty]
        blocks = self._code[name]
        todo, seen, left = [("", next(iter(blocks)), dirty)], set(), False
        while todo:
            place = todo.pop()
            if place in seen:
                continue
            seen.add(place)
            before, label, state = place
            for line in blocks[label]:
                state = self._after(line, state)
                if line.startswith("  ret "):
                    left = left or (state and _succeeds(line, blocks[label], before))
                todo += [(label, to, state) for to in re.findall(r"\blabel %([^\s,\]]+)", line)]
        self._known[name, dirty] = left
        return left

    def _after(self, line: str, state: bool) -> bool:
        if "!nontemporal" in line:
            return True
        if "store atomic " in line:
            self.signals += 1
            self.dirty_signals += state
        called = re.search(r"\bcall\b.*? @([^(]+)\(", line)
        if (called and called[1] == "llvm.x86.sse.sfence") or line.startswith("  fence seq_cst"):
            return False
        if called and called[1] in self._code:
            return self.leaves_dirty(called[1], state)
        return state


def _succeeds(line: str, block: list[str], before: str) -> bool:
    """Whether a return, reached from the block before, is that of a kernel that raised nothing.

    Numba's functions return a status: 0, -2 for None, or that of an exception of their own or of a
    function that they called.
    """
    status = line.split()[-1]
    for one in block:
        if one.startswith(f"  {status} = phi "):
            status = re.findall(rf"\[ (\S+), %{re.escape(before)} \]", one)[0]
            return status in ("0", "-2")
    return status in ("0", "-2", "void") or status.startswith("%")
