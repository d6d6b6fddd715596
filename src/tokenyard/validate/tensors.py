"""Checks of one tensor: what it is, and whether its memory holds what it means."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard.runtime.events import EventHandle
from tokenyard.validate.values import kind, name, names

CPU = torch.device("cpu")
NOT_PLAIN = -1

# How long to search for an element that two views share: `max_work` of np.shares_memory.
_SEARCH = 100_000


def tensor(
    what: str,
    value: Any,
    *,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = CPU,
    after: EventHandle | None = None,
) -> Tensor:
    """A dense tensor of this shape, in which a word stands for any length: ["tokens", 8].

    If device is None, any will do. If the tensor must be read here, `after` is waited for first.
    Every call comes through here, so messages are built only when they are needed.
    """
    if not isinstance(value, Tensor):
        raise not_a_tensor(what, value)
    form(what, value.shape, value.dtype, value.layout, shape=shape, dtypes=dtypes)
    if device is not None and value.device != device:
        raise ValueError(f"{what} is on device {value.device}, want {device}")
    if value.requires_grad:
        value = without_gradient(what, value)
    return held(what, value, after)


def held(what: str, value: Tensor, after: EventHandle | None = None) -> Tensor:
    """The tensor, or a copy of it if its memory does not hold its values.

    Kernels read addresses. But a tensor may stand for the negative of its memory, or have no memory
    of its own: a wrapper around others, one that is traced, one whose storage was freed.
    """
    try:
        if value.data_ptr() and not value.is_neg():
            return value
    except RuntimeError:  # of torch.func's wrappers
        address(what, value)
    if not value.numel() or value.is_meta:  # no kernel reads it
        return value
    if not value.is_neg() and not value._is_zerotensor():
        address(what, value)
    if after is not None:
        after.current_stream_wait()
    return value.clone()


def lies_at(value: Any, num_axes: int, dtype: torch.dtype | None = None) -> int:
    """Where a contiguous CPU tensor of so many axes lies, for calls that read it as it is; the
    address is 0 if it has neither elements nor memory.

    NOT_PLAIN if it is something else, if its memory does not hold what it means (see `held`), or if
    somebody wants its gradient. Calls ask this of each tensor, every time.
    """
    if (
        type(value) is not Tensor
        or not value.is_cpu
        or value.ndim != num_axes
        or (dtype is not None and value.dtype is not dtype)
        or (value.requires_grad and torch.is_grad_enabled())
    ):
        return NOT_PLAIN
    try:
        if not value.is_contiguous() or value.is_neg():
            return NOT_PLAIN
        found = value.data_ptr()
    except RuntimeError:  # of tensors without memory
        return NOT_PLAIN
    return found if found or not value.numel() else NOT_PLAIN


def target(
    what: str,
    value: Any,
    *,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device = CPU,
) -> Tensor:
    """A tensor that a result is written to: its own memory, not a copy."""
    checked = tensor(what, value, shape=shape, dtypes=dtypes, device=device)
    if checked.data_ptr() != value.data_ptr():
        raise ValueError(f"{what} is not what its memory holds, want a plain torch.Tensor")
    return checked


class View:
    """Memory as numpy sees it, with strides in bytes. It is not read, and may be on any device."""

    def __init__(
        self, address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int
    ) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": f"|V{itemsize}",
            "version": 3,
        }

    @classmethod
    def of(cls, value: Tensor) -> View:
        size = value.element_size()
        return cls(value.data_ptr(), value.shape, [size * one for one in value.stride()], size)


def meet(one: View, other: View) -> bool:
    """Whether two views share a byte; also if it would take long to know."""
    shares_memory: Any = np.shares_memory  # numpy's types know no limit of work
    try:
        return bool(shares_memory(np.asarray(one), np.asarray(other), max_work=_SEARCH))
    except np.exceptions.TooHardError:
        return True


def address(what: str, value: Tensor) -> int:
    """The address of a tensor that has elements."""
    try:
        found = value.data_ptr()
    except RuntimeError:  # of torch.func's wrappers
        found = 0
    if not found:
        raise ValueError(f"{what} has no memory of its own, want a plain torch.Tensor")
    return found


def without_gradient(what: str, value: Tensor) -> Tensor:
    """The tensor, detached. Warns, once for each line of the user's code, that a gradient is lost:
    but not under no_grad or inference_mode, nor inside an autograd.Function.
    """
    if torch.is_grad_enabled():
        level, frame = 1, sys._getframe()
        while frame.f_back and str(frame.f_globals.get("__name__")).startswith("tokenyard."):
            level, frame = level + 1, frame.f_back
        warnings.warn(
            f"{what} requires grad, and this call passes no gradient on: take "
            f"tokenyard.nn.functional, or give {what}.detach()",
            stacklevel=level,
        )
    return value.detach()


def not_a_tensor(what: str, value: Any) -> ValueError:
    return ValueError(f"{what} is {kind(value)}, want a torch.Tensor")


def form(
    what: str,
    got: Sequence[int],
    dtype: torch.dtype,
    layout: torch.layout,
    *,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
) -> None:
    """Check the attributes that a tensor has on any device."""
    fits = len(got) == len(shape)
    for length, size in zip(shape, got):
        fits = fits and (length == size or isinstance(length, str))
    if not fits:
        want = "[" + ", ".join(map(str, shape)) + "]"
        raise ValueError(f"{what} has shape {list(got)}, want {want}")
    if dtype not in dtypes:
        raise ValueError(f"{what} has dtype {name(dtype)}, want {names(dtypes)}")
    if layout is not torch.strided:
        raise ValueError(f"{what} has layout {layout}, want torch.strided")


def contiguous(value: Tensor, after: EventHandle | None) -> Tensor:
    """Make contiguous; if that copies, wait for `after` first."""
    if value.is_contiguous():
        return value
    if after is not None:
        after.current_stream_wait()
    return value.contiguous()
