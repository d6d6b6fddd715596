"""Numbers for Buffers and tickets for handles, since operators of torch.library take neither.

An operator takes and returns tensors and numbers only. So a Buffer has a number, and a handle has a
*ticket*: a tensor that holds the handle's number. The handle, and with it the Buffer, lives as long
as the memory of that tensor, whether a graph, autograd or the user holds it.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard.buffer import Buffer
from tokenyard.results import Handle

_buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()
_numbers: weakref.WeakKeyDictionary[Buffer, int] = weakref.WeakKeyDictionary()
_issued: dict[int, tuple[Handle, Buffer]] = {}
_next = itertools.count(1)


def number_of(buffer: Buffer) -> int:
    if buffer not in _numbers:
        number = next(_next)
        _buffers[number] = buffer
        _numbers[buffer] = number
    return _numbers[buffer]


# torch.compiler.assume_constant_result does this, and imports the compiler for it, which takes two
# seconds. A Buffer keeps its number.
number_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def buffer_of(number: int) -> Buffer:
    buffer = _buffers.get(number)
    if buffer is None:
        raise ValueError(f"Buffer {number} is gone, want one that something still refers to")
    return buffer


def issue(handle: Handle, buffer: Buffer) -> Tensor:
    """[1] int64. When its memory is freed, so is the handle."""
    number = next(_next)
    memory = np.array([number], np.int64)
    _issued[number] = (handle, buffer)
    weakref.finalize(memory, _issued.pop, number).atexit = False
    return torch.from_numpy(memory)


def redeem(ticket: Tensor) -> Any:
    """The handle; None if there is no such ticket, which a Buffer refuses on all ranks at once."""
    handle, _ = _issued.get(int(ticket), (None, None))
    return handle


def num_issued() -> int:
    """How many handles are alive."""
    return len(_issued)
