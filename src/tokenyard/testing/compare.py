"""Equal means: same shape, same dtype, same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard.runtime import memory

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same(got: Any, want: Any, what: str = "value") -> None:
    """Fail unless shape, dtype and bits are equal: nothing broadcasts, nothing is rounded, and 0.0
    differs from -0.0. Sequences are compared item by item.

    All NaNs are equal, since torch itself gives them different payloads in different code paths.
    """
    if isinstance(want, (tuple, list)):
        assert isinstance(got, (tuple, list)), f"{what} is {got!r}, want a sequence"
        assert len(got) == len(want), f"{what} has length {len(got)}, want {len(want)}"
        for i, (one, other) in enumerate(zip(got, want)):
            assert_same(one, other, f"{what}[{i}]")
        return
    if not isinstance(want, Tensor):
        assert got == want, f"{what} is {got!r}, want {want!r}"
        return
    assert isinstance(got, Tensor), f"{what} is {got!r}, want a tensor"
    assert got.dtype == want.dtype, f"{what} has dtype {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{what} has shape {list(got.shape)}, want {list(want.shape)}"
    differs = _bits(got) != _bits(want)
    if got.dtype.is_floating_point:
        differs &= ~(_is_nan(got) & _is_nan(want))
    if differs.any():
        where = differs.nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{what}{list(first)} is {got[first].item()!r}, want {want[first].item()!r} "
            f"({len(where)} of {differs.numel()} elements differ)"
        )


def _bits(x: Tensor) -> Tensor:
    if x.dtype == torch.bool:
        return x
    return x.contiguous().view(_BITS[x.element_size()])


def _is_nan(x: Tensor) -> Tensor:
    return x.double().isnan()


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill the library's uninitialised memory with NaN or -2**31 inside this block, so that a value
    which nobody wrote cannot pass for a zero. It affects all threads of the process.
    """
    honest = memory.empty, memory.empty_like, memory.empty_array, memory.take_bytes
    empty, empty_like, empty_array, take_bytes = honest

    def poisoned_empty(*shape: int, **options: Any) -> Tensor:
        return _fill(empty(*shape, **options))

    def poisoned_like(*args: Any, **options: Any) -> Tensor:
        return _fill(empty_like(*args, **options))

    def poisoned_array(*args: Any) -> np.ndarray:
        return _fill(torch.from_numpy(empty_array(*args))).numpy()

    def poisoned_bytes(num_bytes: int) -> np.ndarray:
        out = take_bytes(num_bytes)
        _fill(torch.from_numpy(out))
        return out

    memory.empty = poisoned_empty
    memory.empty_like = poisoned_like
    memory.empty_array = poisoned_array  # type: ignore[assignment]
    memory.take_bytes = poisoned_bytes
    try:
        yield
    finally:
        memory.empty, memory.empty_like, memory.empty_array, memory.take_bytes = honest


def _fill(out: Tensor) -> Tensor:
    if out.dtype.is_floating_point:
        return out.fill_(float("nan"))
    if out.dtype == torch.uint8:  # bytes of anything: 0xFF is NaN in every float format
        return out.fill_(0xFF)
    if out.dtype == torch.bool:
        return out.fill_(True)
    return out.fill_(max(-(2**31), torch.iinfo(out.dtype).min))
