"""Handles that come back as plain tuples of tensors, as those of DeepEP V1 are.

A caller may unpack a handle, keep the tensors (`ctx.save_for_backward(*handle)`), and pass them to
combine as a tuple. Such a tuple is known by the memory of its first tensor: each read of a handle's
first field gives fresh memory, and the handle lives as long as that memory.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_issued: dict[int, Any] = {}  # handles, by the address of the memory of their first field
_on_devices: dict[int, StorageWeakRef] = {}  # by address too: memory that tells nobody of its end


def issue(handle: Any, first: Tensor) -> Tensor:
    """The first field of a handle, in memory by which `find` knows the handle."""
    sweep()
    # One row more, so that a field without rows has memory too.
    shape = (first.shape[0] + 1, *first.shape[1:])
    if first.device.type == "cpu":
        array = np.empty(shape, _as_numpy(first.dtype))
        address = int(array.ctypes.data)
        _issued[address] = handle
        weakref.finalize(array, _issued.pop, address, None).atexit = False
        copy = torch.from_numpy(array)
    else:
        copy = torch.empty(shape, dtype=first.dtype, device=first.device)
        watch_device(handle, copy)
    return copy[: first.shape[0]].copy_(first)


def find(value: Any) -> Any:
    """The handle whose fields these are; None if there is no such handle."""
    if not isinstance(value, (tuple, list)) or not value or not isinstance(value[0], Tensor):
        return None
    handle = _issued.get(_address(value[0]))
    return handle if handle is not None and len(value) == len(handle) else None


def num_issued() -> int:
    """How many first fields are alive."""
    sweep()
    return len(_issued)


def watch_device(handle: Any, first: Tensor) -> None:
    """Know the handle by memory of a device, which `sweep` looks at."""
    address = _address(first)
    _issued[address] = handle
    _on_devices[address] = StorageWeakRef(first.untyped_storage())


def sweep() -> None:
    """Drop the handles whose first field was freed on its device."""
    for address, memory in list(_on_devices.items()):
        if memory.expired():
            _issued.pop(address, None)
            _on_devices.pop(address, None)


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
        return 0


def _as_numpy(dtype: torch.dtype) -> Any:
    return np.bool_ if dtype is torch.bool else np.int32
