"""What huge pages do for segments.

    python benchmarks/huge_pages.py --mib 128 --repeat 5
    python benchmarks/huge_pages.py --exchange --tokens 4096 --repeat 6

The first makes a memory file as `shm.segment` does, with and without MADV_COLLAPSE. It prints the
medians, in milliseconds, of making it, of the first write and of a later one, and of scattering
rows into it in random order. The second makes dispatches and combines between two ranks, in Buffers
with and without huge pages in turns; the first of each kind is left out.

Linux 6.1 or newer. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import tokenyard
from tokenyard.shm import segment
from tokenyard.testing import run_processes

HUGE, LIBC = segment.huge_page(), segment.system()
ROW = 14336  # bytes: 7168 elements of bfloat16


def milliseconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def huge_bytes(address: int) -> int:
    """How much of the mapping at this address lies in huge pages."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= address < int(found[2], 16)
        elif here and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) << 10
    return 0


def measure(num_bytes: int, collapse: bool) -> tuple[list[float], int]:
    """Milliseconds of each step, and how much lies in huge pages."""
    address, fd = segment.find_place(num_bytes, HUGE), os.memfd_create("huge_pages")

    def make() -> None:
        os.posix_fallocate(fd, 0, num_bytes)
        flags = mmap.MAP_SHARED | segment.MAP_FIXED | (0 if collapse else mmap.MAP_POPULATE)
        both = mmap.PROT_READ | mmap.PROT_WRITE
        if LIBC.mmap(address, num_bytes, both, flags, fd, 0) != address:
            raise OSError(ctypes.get_errno(), "mmap")
        if collapse and LIBC.madvise(address, num_bytes, segment._MADV_COLLAPSE) != 0:
            raise OSError(ctypes.get_errno(), "MADV_COLLAPSE")

    made = milliseconds(make)
    mapped: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    memory = np.frombuffer(mapped, np.uint8)
    rows = memory[: num_bytes // ROW * ROW].reshape(-1, ROW)
    order = np.random.default_rng(0).permutation(len(rows))
    source = np.ones_like(rows)
    first, later = (milliseconds(lambda: memory.fill(1)) for _ in range(2))

    def scatter() -> None:
        rows[order] = source

    scattered, found = milliseconds(scatter), huge_bytes(address)
    LIBC.munmap(address, num_bytes)
    os.close(fd)
    return [made, first, later, scattered], found


def exchange(group: Any, num_tokens: int, turns: int) -> list[tuple[bool, list[float]]]:
    """For each Buffer, whether it had huge pages, and the milliseconds of its first dispatch and
    combine, and of later ones.
    """
    torch.set_num_threads(1)
    x = torch.randn(num_tokens, ROW // 2).bfloat16()
    weights, idx = torch.rand(num_tokens, 64).topk(8)
    found = []

    def both(buffer: tokenyard.Buffer) -> tuple[float, float]:
        dist.barrier(group)
        begin = time.perf_counter()
        got: Any = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=64)
        there = time.perf_counter() - begin
        y = buffer.get_next_combine_buffer(got.handle)
        y.copy_(got.recv_x)
        dist.barrier(group)
        return 1e3 * there, milliseconds(lambda: buffer.combine(y, got.handle))

    for turn in range(turns):
        for is_huge in (turn % 2 == 0, turn % 2 == 1):
            segment._huge_page = lambda is_huge=is_huge: HUGE if is_huge else 0  # type: ignore
            with tokenyard.Buffer(group) as buffer:
                first = both(buffer)
                later = zip(*(both(buffer) for _ in range(4)))
                found.append((is_huge, [*first, *map(statistics.median, later)]))
    return found[2:]


def print_exchange(num_tokens: int, turns: int) -> None:
    ranks = run_processes(exchange, 2, num_tokens, turns, timeout=600.0)
    print(f"{num_tokens} tokens | first dispatch | first combine | dispatch | combine")
    for is_huge in (False, True):
        columns = zip(*(times for rank in ranks for huge, times in rank if huge == is_huge))
        figures = (
            f"{statistics.median(one):.1f} ({min(one):.1f}..{max(one):.1f})" for one in columns
        )
        print(f"{'huge' if is_huge else 'ordinary'} pages | {' | '.join(figures)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--exchange", action="store_true", help="between two ranks")
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    if args.exchange:
        print_exchange(args.tokens, args.repeat)
        return
    num_bytes = args.mib << 20
    print(f"{args.mib} MiB | make | first write | later write | scatter rows | in huge pages")
    found: dict[bool, list[tuple[list[float], int]]] = {False: [], True: []}
    for _ in range(args.repeat):
        for collapse, runs in found.items():
            runs.append(measure(num_bytes, collapse))
    for collapse, runs in found.items():
        medians = [statistics.median(column) for column in zip(*(times for times, _ in runs))]
        figures = " | ".join(f"{median:.1f}" for median in medians)
        name = "MADV_COLLAPSE" if collapse else "ordinary"
        print(f"{name} | {figures} | {runs[-1][1] >> 20} MiB")


if __name__ == "__main__":
    main()
