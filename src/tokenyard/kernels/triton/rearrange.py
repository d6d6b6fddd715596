"""Copies between any two strides, after the plan that CPU kernels follow too.

A plan's axes are cut into tiles of two: *inner*, along which dst is written, and *across*, along
which src is read. All other axes are walked by programs, which find their place in a table. Where
something is contiguous in both, inner is that, and both are read and written along it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.base import Array
from tokenyard.kernels.rearrange_plan import Plan, plan
from tokenyard.kernels.triton.launch import blocks, kept_numbers, launch, power_of_two, words

_TILE = 1024  # elements of a tile whose rows are contiguous in both
_SIDE = {1: 64, 2: 64, 4: 32, 8: 32}  # elements of a square that is turned, by their bytes
_TURNED = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_CPU = torch.device("cpu")


class _Axis(NamedTuple):
    """Strides are in granules (see `launch.words`)."""

    length: int
    dst: int
    src: int


class _Job(NamedTuple):
    inner: _Axis
    across: _Axis
    outer: tuple[_Axis, ...]  # the first varies fastest
    constants: dict[str, Any]

    @property
    def grid(self) -> tuple[int]:
        tiles = blocks(self.inner.length * self.constants["GROUP"], self.constants["INNER"])
        tiles *= blocks(self.across.length, self.constants["ACROSS"])
        return (tiles * math.prod(axis.length for axis in self.outer),)

    @property
    def table(self) -> tuple[int, ...]:
        return tuple(number for axis in self.outer for number in axis)


@lru_cache(maxsize=1024)
def _job(made: Plan, aligned: int) -> _Job:
    """Addresses are multiples of `aligned`.

    >>> made = plan((100, 60), (2, 200), (120, 2), 2)  # a matrix of 2 bytes, turned
    >>> _job(made, 16)[:3]
    (_Axis(length=100, dst=1, src=60), _Axis(length=60, dst=100, src=1), ())
    """
    axes = list(made.axes)
    run = axes.pop().length if made.kernel == "runs" else made.unit  # contiguous in both
    granule = math.gcd(aligned, run, *(stride for axis in axes for stride in axis[1:3]))
    cut = [_Axis(axis.length, axis.dst // granule, axis.src // granule) for axis in axes]
    if run > granule or granule not in _TURNED or not cut:
        element, group, _ = words(granule)
        inner, across = _Axis(run // granule, 1, 1), len(cut) - 1
        columns = min(_TILE, power_of_two(inner.length * group))
        most = _TILE // columns
    else:
        element, group = _TURNED[granule], 1
        inner, across = cut.pop(), made.across
        side = _SIDE[granule]
        columns = min(side, power_of_two(inner.length))
        most = side * side // columns
    beside = cut.pop(across) if across >= 0 else _Axis(1, 0, 0)
    constants = {
        "ELEMENT": element,
        "GROUP": group,
        "ALIGNED": math.gcd(aligned, *(granule * stride for axis in cut for stride in axis[1:])),
        "INNER": columns,
        "ACROSS": min(most, power_of_two(beside.length)),
    }
    return _Job(inner, beside, tuple(reversed(cut)), constants)


@triton.jit
def _rearrange_kernel(
    dst,
    src,
    table,
    num_outer,
    inner_length,
    inner_dst,
    inner_src,
    across_length,
    across_dst,
    across_src,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
    INNER: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """One tile. Where GROUP is above 1 the inner axis is contiguous, and counted in granules.

    ALIGNED bytes divide the addresses, and the strides of all axes that are in no tile.
    """
    left = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(inner_length * GROUP, INNER)
    inner = (left % tiles) * INNER + tl.arange(0, INNER)
    left = left // tiles
    tiles = tl.cdiv(across_length, ACROSS)
    across = (left % tiles) * ACROSS + tl.arange(0, ACROSS)
    left = left // tiles
    dst_at, src_at = left * 0, left * 0
    for k in range(num_outer):
        length = tl.load(table + 3 * k)
        index = left % length
        dst_at += index * tl.load(table + 3 * k + 1)
        src_at += index * tl.load(table + 3 * k + 2)
        left = left // length
    dst = tl.multiple_of(dst.to(tl.pointer_type(ELEMENT)) + dst_at * GROUP, ALIGNED)
    src = tl.multiple_of(src.to(tl.pointer_type(ELEMENT)) + src_at * GROUP, ALIGNED)
    mask = (across < across_length)[:, None] & (inner < inner_length * GROUP)[None, :]
    read = src + (across * across_src * GROUP)[:, None] + (inner * inner_src)[None, :]
    write = dst + (across * across_dst * GROUP)[:, None] + (inner * inner_dst)[None, :]
    tl.store(write, tl.load(read, mask=mask), mask=mask)


@triton.jit
def _in_order_kernel(dst, src, table, num_axes, num_elements, ELEMENT: tl.constexpr):
    """Element by element: some of dst share memory, and the last one must win."""
    dst, src = dst.to(tl.pointer_type(ELEMENT)), src.to(tl.pointer_type(ELEMENT))
    for n in range(num_elements):
        left = tl.full([], n, tl.int64)
        write, read = dst, src
        for k in range(num_axes):
            length = tl.load(table + 3 * k)
            index = left % length
            write += index * tl.load(table + 3 * k + 1)
            read += index * tl.load(table + 3 * k + 2)
            left = left // length
        tl.store(write, tl.load(read))


def rearrange(dst: Array, src: Array) -> None:
    if isinstance(dst, Tensor) and isinstance(src, Tensor):
        size, device = dst.element_size(), dst.device
        strides = [tuple(one * size for one in view.stride()) for view in (dst, src)]
        addresses = dst.data_ptr(), src.data_ptr()
    else:
        size, device = dst.itemsize, _CPU
        strides = [tuple(dst.strides), tuple(src.strides)]
        addresses = dst.ctypes.data, src.ctypes.data
    made = plan(tuple(dst.shape), *strides, size)
    if made.num_bytes == 0:
        return
    target, source = addresses[0] + made.dst_start, addresses[1] + made.src_start
    if made.in_order:
        _in_order(made, target, source, device)
        return
    aligned = math.gcd(16, target, source)
    job = _job(made, aligned)
    launch(
        _rearrange_kernel,
        job.grid,
        target,
        source,
        kept_numbers(job.table, device),
        len(job.outer),
        *job.inner,
        *job.across,
        **job.constants,
    )


def _in_order(made: Plan, target: int, source: int, device: torch.device) -> None:
    axes = [(axis.length, axis.dst, axis.src) for axis in reversed(made.axes)]
    if made.kernel != "runs":
        axes.insert(0, (made.unit, 1, 1))
    table = tuple(number for axis in axes for number in axis)
    launch(
        _in_order_kernel,
        (1,),
        target,
        source,
        kept_numbers(table, device),
        len(axes),
        made.num_bytes,
        ELEMENT=tl.int8,
    )
