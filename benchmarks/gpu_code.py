"""What the compiler made of the Triton kernels, as the tables of docs/guide/gpu.md. Needs no GPU.

    python -m benchmarks.gpu_code

Registers, shared memory and spills are the compilers' own figures. The last table is an estimate:
nothing was run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.triton_aot import compile as ahead
from tools.triton_aot.compile import TARGETS, Compiled

# Bytes of memory a second; instructions that all schedulers can start in a second (SMs or CUs,
# times four, times clock); SMs or CUs. From the vendors' data sheets.
ROOFS = {
    "sm_90": ("H100 SXM", 3.35e12, 132 * 4 * 1.755e9, 132),
    "gfx942": ("MI300X", 5.3e12, 304 * 4 * 2.1e9, 304),
}
LATENCY = 700e-9  # about: as much as is read in this time must be on its way to fill the memory

# Bytes that a program reads and writes in one go through its code: elements of a tile, times their
# size, times reads and writes. What a kernel is compiled for is in tools/triton_aot/catalogue.py.
MOVED = {
    "pack bfloat16": ("_pack_kernel", 2 * 4096),
    "put bfloat16": ("_put_kernel", 2 * 4096),
    "spread bfloat16": ("_spread_kernel", 2 * 4096),
    "copy bfloat16": ("_rearrange_kernel", 2 * 4096),
    "rearrange bfloat16": ("_rearrange_kernel", 2 * 64 * 64 * 2),
    "reduce bfloat16": ("_reduce_kernel", 2 * 4096),
    "unpermute bfloat16 weighted": ("_unpermute_kernel", 2 * 4096),
    "to_fp8 bfloat16 plain": ("_to_fp8_kernel", 16 * 128 * 3),
    "from_fp8 plain": ("_from_fp8_kernel", 16 * 128 * 3),
}
WARPS = 4
REGISTERS = {
    "sm_90": 65536,
    "gfx942": 4 * 512 * 64,
}  # of an SM or CU, counted in threads' registers
MOST_PROGRAMS = {"sm_90": 16, "gfx942": 8}  # of four warps or waves at once, by threads


def span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def instructions(one: Compiled) -> int:
    """Of the whole kernel, loops counted once."""
    if one.target.startswith("sm_"):
        body = one.text[one.text.index("{") :]
        return len(re.findall(r"^\s+(?:@!?%p\d+ )?[a-z][\w.:]*\s[^\n]*;", body, re.MULTILINE))
    return len(re.findall(r"^\t[sv]_\w+|^\t(?:global|buffer|ds)_\w+", one.text, re.MULTILINE))


def print_code(made: dict[str, list[Compiled]]) -> None:
    by_kernel: dict[str, dict[str, list[Compiled]]] = defaultdict(lambda: defaultdict(list))
    for target, found in made.items():
        for one in found:
            by_kernel[one.kernel.strip("_").removesuffix("_kernel")][target].append(one)
    print("| kernel | registers: " + ", ".join(TARGETS) + " | shared memory, bytes | spills |")
    print("|---|---|---|---|")
    for kernel in sorted(by_kernel):
        by_target = by_kernel[kernel]
        registers = ", ".join(span([one.registers for one in by_target[t]]) for t in TARGETS)
        every = [one for t in TARGETS for one in by_target[t]]
        shared, spills = span([one.shared for one in every]), span([one.spills for one in every])
        print(f"| {kernel} | {registers} | {shared} | {spills} |")


def print_estimate(made: dict[str, list[Compiled]]) -> None:
    print("\n| kernel | " + " | ".join(ROOFS[t][0] for t in ROOFS) + " |")
    print("|---|" + "---|" * len(ROOFS))
    for case, (kernel, moved) in MOVED.items():
        cells = []
        for target, (_, bandwidth, rate, cores) in ROOFS.items():
            (one,) = [m for m in made[target] if (m.case, m.kernel) == (case, kernel)]
            memory = moved / bandwidth
            issue = WARPS * instructions(one) / rate
            lanes = TARGETS[target].warp_size * WARPS
            fit = min(MOST_PROGRAMS[target], REGISTERS[target] // (lanes * one.registers))
            flying = fit * moved / 2 * cores / (bandwidth * LATENCY)
            cells.append(f"{issue / memory:.2f}, {flying:.1f}")
        print(f"| {case} | {' | '.join(cells)} |")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    made = {target: ahead.compile_for(target) for target in TARGETS}
    print_code(made)
    print_estimate(made)


if __name__ == "__main__":
    main()
