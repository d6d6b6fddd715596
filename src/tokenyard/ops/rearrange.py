"""Copy between any two strides: transposes, permutations, slices, broadcasts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.kernels.base import Array, pick
from tokenyard.kernels.rearrange_plan import MOST_AXES

_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


def rearrange(dst: Array, src: Array, *, kernels: str = "auto") -> None:
    """dst[i, j, ...] = src[i, j, ...] at every index, whatever the strides: bytes move, not values.

    dst and src are two tensors or two numpy arrays of the same shape and dtype. They must not share
    a byte; views of the same memory whose elements interleave are fine. src may have an axis of
    stride 0; dst may not. No gradient is recorded. On CPU `torch.get_num_threads()` threads share
    the work.

    >>> dst = torch.empty(3, 2, dtype=torch.int32)
    >>> rearrange(dst, torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32).t())
    >>> dst.tolist()
    [[1, 4], [2, 5], [3, 6]]
    >>> line = np.arange(6)
    >>> rearrange(line[1::2], line[::2][::-1])
    >>> line.tolist()
    [0, 4, 2, 2, 4, 0]
    """
    if isinstance(dst, Tensor):
        kernel_set = pick(kernels, "cpu" if dst.is_cpu else dst.device.type)
        _check_tensors(dst, src)
        if dst.is_neg() != src.is_neg() or (
            dst.dtype in _COMPLEX and dst.is_conj() != src.is_conj()
        ):
            dst.copy_(src)  # one of them is a lazy negative or conjugate of its own memory
            return
        kernel_set.rearrange(dst, src)
        torch.autograd.graph.increment_version(dst)
    else:
        _check_arrays(dst, src)
        pick(kernels, "cpu").rearrange(dst, src)


def _check_tensors(dst: Tensor, src: Any) -> None:
    if not isinstance(src, Tensor):
        raise ValueError(f"src is a {type(src).__name__}, want a Tensor like dst")
    itemsize = dst.element_size()
    layout = (dst.shape, dst.stride(), src.shape, src.stride(), itemsize, itemsize)
    spans = _spans(*layout)
    if src.dtype is not dst.dtype:
        raise ValueError(f"src is {src.dtype}, want dst's {dst.dtype}")
    if not (dst.is_cpu and src.is_cpu) and dst.device != src.device:
        raise ValueError(f"src is on {src.device}, want dst's {dst.device}")
    if (dst.requires_grad or src.requires_grad) and torch.is_grad_enabled():
        what = "dst" if dst.requires_grad else "src"
        raise ValueError(f"{what} requires grad, want {what}.detach() or torch.no_grad()")
    if spans is not None:
        addresses = validate.address("dst", dst), validate.address("src", src)
        _check_apart(*addresses, spans, layout)


def _check_arrays(dst: Any, src: Any) -> None:
    kind = type(dst).__name__
    _require(isinstance(dst, np.ndarray), f"dst is a {kind}, want a Tensor or an ndarray")
    _require(isinstance(src, np.ndarray), f"src is a {type(src).__name__}, want a {kind} like dst")
    layout = (dst.shape, dst.strides, src.shape, src.strides, dst.itemsize, 1)
    spans = _spans(*layout)
    _require(src.dtype == dst.dtype, f"src is {src.dtype}, want dst's {dst.dtype}")
    _require(not dst.dtype.hasobject, f"dst is {dst.dtype}, want a dtype without references")
    _require(dst.flags.writeable, "dst is read-only, want a writeable array")
    if spans is not None:
        _check_apart(dst.ctypes.data, src.ctypes.data, spans, layout)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@lru_cache(maxsize=1024)
def _spans(
    shape: tuple[int, ...],
    dst_strides: tuple[int, ...],
    src_shape: tuple[int, ...],
    src_strides: tuple[int, ...],
    itemsize: int,
    step: int,
) -> tuple[int, int, int, int] | None:
    """Where dst and src begin and end, in bytes from their first elements; None without elements.

    Strides count `step` bytes. Cached, since the same layouts come again and again.

    >>> _spans((3, 2), (2, 1), (3, 2), (-1, 3), 4, 4)
    (0, 24, -8, 16)
    """
    shapes = f"{tuple(src_shape)}, want dst's {tuple(shape)}"
    _require(tuple(src_shape) == tuple(shape), f"src has shape {shapes}")
    _require(len(shape) <= MOST_AXES, f"dst has {len(shape)} axes, want at most {MOST_AXES}")
    if 0 in shape:
        return None
    for axis, (length, stride) in enumerate(zip(shape, dst_strides)):
        if stride == 0 and length > 1:
            raise ValueError(f"dst has stride 0 on axis {axis} of length {length}, want length 1")
    ends = []
    for strides in (dst_strides, src_strides):
        last = [(length - 1) * stride * step for length, stride in zip(shape, strides)]
        ends += [sum(min(one, 0) for one in last), sum(max(one, 0) for one in last) + itemsize]
    return ends[0], ends[1], ends[2], ends[3]


def _check_apart(
    dst: int, src: int, spans: tuple[int, int, int, int], layout: tuple[Any, ...]
) -> None:
    """Raise if dst and src share a byte. Comparing their ends is nearly always enough."""
    if dst + spans[1] <= src + spans[2] or src + spans[3] <= dst + spans[0]:
        return
    shape, dst_strides, _, src_strides, itemsize, step = layout
    views = [
        validate.View(address, shape, [step * stride for stride in strides], itemsize)
        for address, strides in ((dst, dst_strides), (src, src_strides))
    ]
    _require(not validate.meet(*views), "src shares memory with dst, want memory of its own")
