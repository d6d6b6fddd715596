"""The processor: its cores, those that this process may use, memory nodes, and compiled kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from tokenyard import kernels
from tokenyard.tools.doctor.findings import OK, WARN, Finding, read

PART = "processor"
_HUGE = Path("/sys/kernel/mm/transparent_hugepage")
_NODES = Path("/sys/devices/system/node")
_QUOTAS = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")


def look() -> Iterator[Finding]:
    yield from _cores()
    yield from _memory_nodes()
    yield from _huge_pages()
    yield from _kernels()


def _cores() -> Iterator[Finding]:
    total = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    threads, quota = torch.get_num_threads(), _quota()
    may = f"{mine} of {total} cores" if mine < total else f"{total} cores"
    usable = float(mine) if quota is None else min(mine, quota)
    held = "" if quota is None or quota >= mine else f", of which its cgroup grants {quota:g}"
    what = f"this process may use {may}{held}; torch gives a call {threads} threads"
    if threads > usable:
        advice = f"set OMP_NUM_THREADS to cores by ranks of the machine: {usable:g} / ranks"
        yield Finding(WARN, PART, what, advice)
    else:
        advice = "with several ranks on this machine, set OMP_NUM_THREADS to cores / ranks"
        yield Finding(OK, PART, what, advice if threads > 1 else "")


def _quota() -> float | None:
    """Cores that the cgroup of this process grants; None if it grants all."""
    text = read(_QUOTAS[0])
    if text is not None:
        most, period = text.split()
        return None if most == "max" else int(most) / int(period)
    quota, period_us = read(_QUOTAS[1]), read(_QUOTAS[1].replace("cfs_quota", "cfs_period"))
    if quota is None or period_us is None or int(quota) <= 0:
        return None
    return int(quota) / int(period_us)


def _memory_nodes() -> Iterator[Finding]:
    nodes = sorted(_NODES.glob("node[0-9]*"))
    if len(nodes) < 2:
        yield Finding(OK, PART, "one memory node (NUMA)")
        return
    cores = "; ".join(f"{node.name}: cores {read(node / 'cpulist')}" for node in nodes)
    yield Finding(
        OK,
        PART,
        f"{len(nodes)} memory nodes (NUMA), {cores}",
        "keep each rank on one: numactl --cpunodebind=N --membind=N (docs/internals/numa.md)",
    )


def _huge_pages() -> Iterator[Finding]:
    own, shared = read(_HUGE / "enabled"), read(_HUGE / "shmem_enabled")
    if own is None:
        return
    if "[never]" in own or "[deny]" in (shared or ""):
        yield Finding(
            WARN,
            PART,
            "huge pages are off, so large rows are moved by pages of 4 KiB",
            f"as root: echo madvise > {_HUGE}/enabled, and never, not deny, in shmem_enabled",
        )
    else:
        yield Finding(OK, PART, "huge pages are granted to those who ask")


def _kernels() -> Iterator[Finding]:
    told = kernels.describe("cpu")
    if told.processor is None:
        yield Finding(WARN, PART, f"kernels: {told.kernels}, {told.why}")
        return
    by = told.processor
    what = f"kernels: {told.kernels} for {by.name}, vectors of {by.vector_bits} bits"
    yield Finding(OK, PART, what)
    if told.folder is None:
        yield Finding(
            WARN,
            PART,
            f"compiled kernels cannot be kept: {told.folder_why}; every start compiles anew",
            "set NUMBA_CACHE_DIR to a folder that can be written",
        )
    elif not any(Path(told.folder).rglob("*.nbc")):
        yield Finding(
            WARN,
            PART,
            f"no kernel is compiled yet in {told.folder}: a first call takes some ten seconds",
            "tokenyard warm-up",
        )
    else:
        yield Finding(OK, PART, f"compiled kernels are kept in {told.folder}")
