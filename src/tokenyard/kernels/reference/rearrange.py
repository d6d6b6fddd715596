"""Copies between any two strides, left to torch and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from tokenyard.kernels.base import Array
from tokenyard.kernels.rearrange_plan import plan


def rearrange(dst: Array, src: Array) -> None:
    """
    >>> rearrange(dst := np.zeros((2, 2)), np.array([[1.0, 2.0], [3.0, 4.0]]).T)
    >>> dst.tolist()
    [[1.0, 3.0], [2.0, 4.0]]
    """
    if _in_order(dst):
        index: tuple[Any, ...]
        for index in np.ndindex(*dst.shape):
            element = (*index, ...)  # the ellipsis: a view of the element, not a number
            dst[element] = src[element]
    elif isinstance(dst, Tensor):
        dst.copy_(src)
    else:
        np.copyto(dst, src)


def _in_order(dst: Array) -> bool:
    """Whether elements share memory, so that copying them in another order would show."""
    if isinstance(dst, Tensor):
        strides = tuple(stride * dst.element_size() for stride in dst.stride())
        return plan(dst.shape, strides, strides, dst.element_size()).in_order
    return plan(dst.shape, dst.strides, dst.strides, dst.itemsize).in_order
