"""Handles of which a copy is all that is left: their memory is another's by now."""

from __future__ import annotations

import copy
import gc
import pickle
from array import array
from typing import Any

import torch

from tests.fuzz.results import Result

_DEEP = 6  # how far inside of a handle its memory lies


def replace(result: Result, how: str) -> list[Any]:
    """Let a copy take the place of a result's handle. The original dies, and what is returned has
    its memory, as far as the allocator lends it again.
    """
    if type(result.handle) is tuple:  # known by its tensors, of which a copy has others
        return []
    sizes = _sizes(result.handle)
    result.read()
    if how == "tuple":
        result.handle, result.reads = tuple(result.handle), {}
    elif how == "pickle":
        result.handle = pickle.loads(pickle.dumps(result.handle))
    else:
        result.handle = copy.deepcopy(result.handle)
    gc.collect()
    return [array("q", [0]) * size for size in sizes for _ in range(16)]


def _sizes(handle: Any) -> list[int]:
    """Words of the arrays and tensors inside of a handle."""
    sizes, found, seen = [], [handle], {id(handle)}
    for _ in range(_DEEP):
        inner = [one for one in gc.get_referents(*found) if id(one) not in seen]
        found = [one for one in inner if not isinstance(one, type)]
        seen.update(map(id, found))
        for one in found:
            if isinstance(one, array):
                sizes.append(len(one))
            elif isinstance(one, torch.Tensor):
                sizes.append(one.numel() * one.itemsize // 8 + 1)
    return sorted(set(sizes))


def scribble(result: Result) -> None:
    """Write over what a call brought, as a user may."""
    for name, value in result.named.items():
        if name in result.reads or name == "src_idx":  # which are the handle's
            continue
        for one in value[:3] if name == "received" else [value]:
            if isinstance(one, list):
                one.clear()
            elif isinstance(one, torch.Tensor):
                with torch.inference_mode(one.is_inference()):
                    whole = not one.is_floating_point()
                    one.fill_(torch.iinfo(one.dtype).max) if whole else one.zero_()
