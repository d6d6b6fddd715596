"""Threads of one call: plain ones, over kernels that release the GIL.

Numba's own threading layer is not used: it clashes with torch's OpenMP. A call takes as many
threads as torch was told to take, and none where the work is small. Results never depend on the
number. (A channel is not a thread: it has rings of its own, see `Config`.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from tokenyard.runtime.interrupts import deferred, stopping
from tokenyard.types import split_range

# Below this many bytes a thread, starting it costs more than it saves (about 100 us each).
_BYTES_PER_THREAD = 4 << 20
MUCH = 2 * _BYTES_PER_THREAD  # bytes from which several threads may share work


def num_threads(num_items: int, num_bytes: int) -> int:
    """How many threads pay for work on so many items that is worth a copy of so many bytes."""
    if num_bytes < MUCH:
        return 1
    return max(1, min(num_items, num_bytes // _BYTES_PER_THREAD, torch.get_num_threads()))


def in_threads(body: Callable[[int, int], object], num_items: int, num_bytes: int) -> None:
    """Call body(begin, end) over consecutive parts of range(num_items), side by side if it pays."""
    threads = num_threads(num_items, num_bytes)
    if threads == 1:
        body(0, num_items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="tokenyard-part") as pool:
        try:
            with deferred():  # the pool forgets a thread whose start Ctrl-C interrupts
                ranges = split_range(num_items, threads)
                parts = [pool.submit(body, begin, end) for begin, end in ranges]
            for part in parts:
                part.result()
        except KeyboardInterrupt as error:
            with stopping(error):
                pool.shutdown()
            raise


def has_core_each(size: int) -> bool:
    """Whether each of so many ranks can have a core. Ranks that are bound to fewer cores mostly
    share them with other programs, for example a server's, which must not wait for a spinning rank.
    """
    return size <= len(os.sched_getaffinity(0))
