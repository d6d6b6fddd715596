"""What kernels are compiled for: the processor, and what LLVM makes of it.

A processor's name does not say what LLVM does for it, and a list of its features may be empty
(NUMBA_CPU_NAME, NUMBA_CPU_FEATURES). So three small functions are compiled, and the result is read.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

import llvmlite.binding as llvm
import numba
from numba.core.registry import cpu_target


class Processor(NamedTuple):
    """What kernels are compiled for."""

    machine: str  # x86_64 or aarch64, say
    name: str  # as LLVM calls it, cascadelake, say
    is_named: bool  # by NUMBA_CPU_NAME; otherwise it is the one that LLVM finds here
    vector_bits: int  # of the widest registers that kernels use, 0 if that is not known
    converts_float16: bool  # by instructions; elsewhere kernels do it by integer arithmetic
    streams_by: str  # the instruction that writes past the cache, or nothing if LLVM has none


# Vectors as kernels have them: 16 elements of float32, and whole lines.
_SAMPLES = """
define void @widen(ptr %from, ptr %to) {
  %narrow = load <16 x half>, ptr %from
  %wide = fpext <16 x half> %narrow to <16 x float>
  store <16 x float> %wide, ptr %to
  ret void
}
define void @narrow(ptr %from, ptr %to) {
  %wide = load <16 x float>, ptr %from
  %narrow = fptrunc <16 x float> %wide to <16 x half>
  store <16 x half> %narrow, ptr %to
  ret void
}
define void @stream(ptr %from, ptr %to) {
  %line = load <8 x i64>, ptr %from
  store <8 x i64> %line, ptr %to, align 64, !nontemporal !0
  ret void
}
!0 = !{i32 1}
"""
_REGISTERS = {"%zmm": 512, "%ymm": 256, "%xmm": 128, "q0": 128}


@cache
def processor() -> Processor:
    """The one that this process compiles for."""
    return read(*cpu_target.target_context.codegen().magic_tuple())


def read(triple: str, name: str, features: str) -> Processor:
    """What LLVM makes of a processor, which need not be that of this machine."""
    target = llvm.Target.from_triple(triple).create_target_machine(name, features, opt=3)
    code = target.emit_assembly(llvm.parse_assembly(_SAMPLES))
    streamed = re.search(r"\b(v?movnt\w+|stnp)\b", code)
    found = [bits for register, bits in _REGISTERS.items() if register in code]
    return Processor(
        machine=triple.partition("-")[0],
        name=name,
        is_named=numba.config.CPU_NAME is not None,
        vector_bits=max(found, default=0),
        # Where there are no instructions LLVM calls functions, which Numba has not.
        converts_float16=re.search(r"\b(call|bl)\w*\s", code) is None,
        streams_by=streamed[1] if streamed else "",
    )
