"""The one place where uninitialised memory comes from.

`tokenyard.testing.poisoned` replaces `empty`, `empty_like` and `empty_array` with functions that
fill what they give with NaN or -2**31, so that a value which nobody wrote cannot pass for a zero.
Call them as `memory.empty`.

Large results get memory that earlier ones have left. The system gives out pages as zeros, one fault
each, and what is freed above 32 MB goes back to it at once: at 100 MB a fresh result costs three
times the copy that fills it.
"""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch
from torch import Tensor

from tokenyard.runtime import limits
from tokenyard.wire.columns import LINE

# For small results on CPU: torch.empty takes twice as long as torch.empty_like, and as
# torch.from_numpy(np.empty), which knows fewer dtypes.
empty_like = torch.empty_like
empty_array = np.empty

LARGE = 1 << 22  # bytes; from here on numpy asks for huge pages, which torch does not
MOST_KEPT = 1 << 30  # bytes that wait for a result
_WORTH_A_LOOK = 64 << 20  # bytes; from here on the system is asked whether it has as many

# By id, the longest dead first. A result may die on any thread, and on this one at any allocation,
# since the collector of cycles runs there: so every step here is one that nothing can interrupt.
_kept: dict[int, np.ndarray] = {}


def empty(
    *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu"
) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LARGE or torch.device(device).type != "cpu":
        return torch.empty(*shape, dtype=dtype, device=device)  # half the time of empty(shape)
    return torch.from_numpy(_lasting(num_bytes)).view(dtype).view(shape)


def _lasting(num_bytes: int) -> np.ndarray:
    """Bytes from a line's boundary on. When this array has died, its memory waits for the next.

    A tensor made of it keeps it alive, and so does every view of that tensor.
    """
    step = 1 << (num_bytes.bit_length() - 4)  # an eighth at most, so that sizes meet again
    wanted = (num_bytes + LINE + step - 1) // step * step
    block = _take(wanted)
    if block is None:
        block = _fresh(wanted)
    begin = -block.ctypes.data % LINE
    array = block[begin : begin + num_bytes]
    weakref.finalize(array, _keep, block).atexit = False
    return array


def _fresh(num_bytes: int) -> np.ndarray:
    """Raises MemoryError, and does not wait for the killer, if there is too little."""
    try:
        if num_bytes >= _WORTH_A_LOOK:
            limits.check(num_bytes)
        return np.empty(num_bytes, np.uint8)
    except MemoryError:
        _kept.clear()
    if num_bytes >= _WORTH_A_LOOK:
        limits.check(num_bytes)
    return np.empty(num_bytes, np.uint8)


def _take(wanted: int) -> np.ndarray | None:
    """The smallest block that fits, unless most of it would lie idle."""
    fitting = [block for block in list(_kept.values()) if wanted <= block.size <= 2 * wanted]
    for block in sorted(fitting, key=len):
        if _kept.pop(id(block), None) is not None:
            return block
    return None


def _keep(block: np.ndarray) -> None:
    """If there is too much of it, the longest dead goes."""
    if block.size > MOST_KEPT:
        return
    _kept[id(block)] = block
    waiting = list(_kept.values())
    excess = sum(map(len, waiting)) - MOST_KEPT
    for oldest in waiting:
        if excess <= 0:
            break
        _kept.pop(id(oldest), None)
        excess -= oldest.size


def as_bytes(x_ND: Tensor) -> Tensor:
    """The rows of a contiguous 2-D tensor as bytes: [N, D] -> [N, B] uint8."""
    if x_ND.stride(1) != 1:  # contiguous for torch if it is empty or has one column, but no view
        x_ND = x_ND.clone(memory_format=torch.contiguous_format)
    return x_ND.view(torch.uint8)
