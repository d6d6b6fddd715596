"""How kernels are started, and the little that the host must read of them.

Under TRITON_INTERPRET=1, which Triton reads when a kernel is defined, kernels run in Python on CPU
tensors: slowly, and one at a time, since the interpreter keeps its state in globals.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

NONE = 1 << 62  # in place of the first bad index, where there is none


@triton.jit
def _nothing():
    pass


INTERPRETED = not isinstance(_nothing, triton.JITFunction)
_interpreter = threading.Lock()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel, unless its grid is empty.

    Products must be rounded before they are added, so no multiply is fused with an add.
    """
    if 0 in grid:
        return
    with _on_device_of(arguments):
        kernel[grid](*arguments, **constants, enable_fp_fusion=False)


@contextmanager
def _on_device_of(arguments: Sequence[Any]) -> Iterator[None]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if INTERPRETED:
        # A device says nothing of infinities, and neither does the specification.
        with _interpreter, np.errstate(all="ignore"):
            yield
        return
    first = next(one for one in arguments if isinstance(one, Tensor))
    if not first.is_cuda:  # ahead of time
        yield
        return
    with torch.cuda.device(first.device):  # no GPU has run this
        yield


def first_bad(device: torch.device) -> Tensor:
    """A counter that kernels lower to the first place where they find a bad index."""
    return torch.full((1,), NONE, dtype=torch.int64, device=device)


def read_first_bad(counter: Tensor) -> int:
    """Waits for the device: what it finds decides whether the call raises."""
    place = int(counter.item())
    return -1 if place == NONE else place


def numbers(values: Sequence[int], device: torch.device) -> Tensor:
    """int64s that a kernel reads, brought there without waiting for the device."""
    there = torch.tensor(values, dtype=torch.int64, device="cpu")
    if device.type == "cpu":
        return there
    return there.pin_memory().to(device, non_blocking=True)  # no GPU has run this


@lru_cache(maxsize=256)
def kept_numbers(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers that come again and again: brought to the device once, and kept there."""
    return numbers(values, device)


def power_of_two(value: int) -> int:
    """The next one.

    >>> [power_of_two(n) for n in (0, 1, 2, 3, 64, 65)]
    [1, 1, 2, 4, 64, 128]
    """
    return 1 << max(0, value - 1).bit_length()


def blocks(count: int, size: int) -> int:
    return -(-count // size)


_ELEMENTS = {1: (tl.int8, 1), 2: (tl.int16, 1), 4: (tl.int32, 1), 8: (tl.int32, 2)}


def words(granule: int) -> tuple[Any, int, int]:
    """How memory in granules of 1, 2, 4, 8 or 16 bytes is moved: (element, GROUP, its bytes).

    An element has at most four bytes. GROUP elements are a granule; a kernel that multiplies by it
    lets the compiler see that granules begin on their boundary, and move 16 bytes at once.
    """
    element, group = _ELEMENTS.get(granule, (tl.int32, 4))
    return element, group, granule // group
