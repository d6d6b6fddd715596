"""Copies between any two strides, box by box as `kernels.rearrange_plan` says.

A box is filled in place, or in a *stage* that stays in the cache. A staged box is then drained: its
runs are written to dst as whole lines, by streaming stores. If the next box goes on where this one
ends, the line between them is kept for it, so that runs of odd lengths are written in whole lines
too. Long runs need no stage: they are drained straight from src.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tokenyard.kernels.base import Array
from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores, stream_line
from tokenyard.kernels.numba.llvm.pointers import INT64, copy_bytes, pointer
from tokenyard.kernels.numba.llvm.transpose import copy_line, stack
from tokenyard.kernels.numba.rearrange.blocks import KERNELS, LIKE, RUNS, fill_block
from tokenyard.kernels.rearrange_plan import MOST_AXES, Plan, plan
from tokenyard.runtime import memory
from tokenyard.runtime.threads import in_threads
from tokenyard.wire.columns import LINE

# A plan as a table of int64: seven for the whole, then six for each axis.
_HEAD, _FIELDS = 7, 6
_LENGTH, _BOX, _DST, _SRC, _INTO, _LOOP = range(_FIELDS)
_SCRATCH = 8 * MOST_AXES * (1 + 4 + 4)  # sizes, and two sets of wheels


@njit(nogil=True, inline="always")
def _set_wheel(wheels, k, index, count, target_step, source_step):
    wheels[4 * k] = index
    wheels[4 * k + 1] = count
    wheels[4 * k + 2] = target_step
    wheels[4 * k + 3] = source_step


@njit(nogil=True, cache=True)
def _turn(wheels, num_wheels, target, source):
    """One step of nested loops, of which the last wheel is the inmost."""
    for k in range(4 * (num_wheels - 1), -1, -4):
        index, count = wheels[k] + 1, wheels[k + 1]
        target += wheels[k + 2]
        source += wheels[k + 3]
        if index < count:
            wheels[k] = index
            break
        wheels[k] = 0
        target -= count * wheels[k + 2]
        source -= count * wheels[k + 3]
    return target, source


@njit(nogil=True, inline="always")
def _fill(
    kernel, unit, across, axes, num_axes, size, wheels, target, source, next_source, streaming, like
):
    """The box at `source`, in the order in which src has it."""
    num_wheels, num_blocks = 0, 1
    for k in range(num_axes):
        loop = axes[k * _FIELDS + _LOOP]
        if loop >= 0 and size[loop] > 1:
            at = loop * _FIELDS
            _set_wheel(wheels, num_wheels, 0, size[loop], axes[at + _INTO], axes[at + _SRC])
            num_wheels += 1
            num_blocks *= size[loop]
    t_J, s_J, n_J = np.int64(0), np.int64(0), np.int64(1)
    if across >= 0:
        at = across * _FIELDS
        t_J, s_J, n_J = axes[at + _INTO], axes[at + _SRC], size[across]
    at = (num_axes - 1) * _FIELDS
    t_IJ, s_IJ = (axes[at + _INTO], t_J), (axes[at + _SRC], s_J)
    n_IJ = (size[num_axes - 1], n_J)
    for n in range(num_blocks):
        to, of = target, source
        target, source = _turn(wheels, num_wheels, target, source)
        ahead = source if n + 1 < num_blocks else next_source
        fill_block(kernel, to, t_IJ, of, s_IJ, n_IJ, ahead, streaming, unit, like)


@njit(nogil=True, cache=True)
def _stream_run(target, source, num_bytes, goes_on_from, goes_on):
    """Whole lines by streaming stores, the ends the ordinary way.

    If this goes on from a run before it, the end of that one lies before the source. If another
    goes on from this one, its end is put there.
    """
    shift, end = source - target, target + num_bytes
    if goes_on_from:
        line = target - target % LINE
    else:
        line = min(target + -target % LINE, end)
        if line > target:
            copy_bytes(target, source, line - target)
    while line + LINE <= end:
        stream_line(line, line + shift)
        line += LINE
    if goes_on:
        copy_line(source - LINE, end + shift - LINE)
    elif line < end:
        copy_bytes(line, line + shift, end - line)


@njit(nogil=True, cache=True)
def _drain(
    axes, run, of, size, wheels, target, source, num_bytes, streaming, goes_on_from, goes_on
):
    """The runs of a box, in the order in which dst has them. `of` says how they lie at `source`."""
    num_wheels, num_runs = 0, 1
    for k in range(run):
        if size[k] > 1:
            at = k * _FIELDS
            _set_wheel(wheels, num_wheels, 0, size[k], axes[at + _DST], axes[at + of])
            num_wheels += 1
            num_runs *= size[k]
    for _ in range(num_runs):
        if streaming:
            _stream_run(target, source, num_bytes, goes_on_from, goes_on)
        else:
            copy_bytes(target, source, num_bytes)
        target, source = _turn(wheels, num_wheels, target, source)


@njit(nogil=True, inline="always")
def _set_grid(grid, axes, num_axes, dst, src, box):
    """Wheels over the boxes, which stand at the given one; and where that begins."""
    for k in range(num_axes - 1, -1, -1):
        at = k * _FIELDS
        step = axes[at + _BOX]
        count = (axes[at + _LENGTH] + step - 1) // step
        index = box % count
        box //= count
        _set_wheel(grid, k, index, count, step * axes[at + _DST], step * axes[at + _SRC])
        dst += index * step * axes[at + _DST]
        src += index * step * axes[at + _SRC]
    return dst, src


@njit(nogil=True, inline="always")
def _has_same_runs(grid, run, num_axes):
    """Whether the box at which the grid now stands is further along the runs of the one before."""
    further = grid[4 * run]
    for k in range(run + 1, num_axes):
        further += grid[4 * k]
    return further > 0


@njit(nogil=True, cache=True)
def _rearrange_kernel(dst, src, stage, table, begin, end, like):
    """Copy boxes begin..end-1 of a plan."""
    head, axes = pointer(table, INT64), pointer(table + 8 * _HEAD, INT64)
    kernel, unit, num_axes, across, run = head[0], head[1], head[2], head[3], head[4]
    staged, streaming = head[5] != 0, head[6] != 0
    scratch = stack(_SCRATCH)
    size = pointer(scratch, INT64)
    grid = pointer(scratch + 8 * num_axes, INT64)
    wheels = pointer(scratch + 40 * num_axes, INT64)
    target, source = _set_grid(grid, axes, num_axes, dst, src, begin)
    first = stage + LINE  # room for the end of the run before
    goes_on_from = False
    for box in range(begin, end):
        num_bytes = unit  # of a run
        for k in range(num_axes):
            step = axes[k * _FIELDS + _BOX]
            size[k] = min(step, axes[k * _FIELDS + _LENGTH] - grid[4 * k] * step)
            if k >= run:
                num_bytes *= size[k]
        next_target, next_source = _turn(grid, num_axes, target, source)
        if staged or kernel != RUNS:
            # A stage is read again at once: nothing is streamed into it.
            _fill(
                kernel, unit, across, axes, num_axes, size, wheels,
                first if staged else target, source, next_source, streaming and not staged, like,
            )  # fmt: skip
        if staged:
            goes_on = box + 1 < end and next_target == target + num_bytes
            goes_on = goes_on and _has_same_runs(grid, run, num_axes)
            goes_on = goes_on and (goes_on_from or num_bytes >= LINE)  # a line's worth to keep
            _drain(
                axes, run, _INTO, size, wheels, target, first, num_bytes,
                True, goes_on_from, goes_on,
            )  # fmt: skip
            goes_on_from = goes_on
        elif kernel == RUNS:
            _drain(
                axes, run, _SRC, size, wheels, target, source, num_bytes, streaming, False, False
            )
        target, source = next_target, next_source
    fence_stores()


class _Job(NamedTuple):
    """A plan, ready for the kernel."""

    table: np.ndarray
    address: int  # of the table
    like: np.ndarray
    num_boxes: int
    num_bytes: int
    stage_bytes: int  # 0 if nothing is staged
    dst_start: int
    src_start: int
    alone: bool  # not for several threads


def _job(plan: Plan) -> _Job:
    num_axes = len(plan.axes)
    loops = [k for k in range(num_axes - 1) if k != plan.across]
    # The largest steps of src outside: a box is read in the order in which src has it.
    loops.sort(key=lambda k: -abs(plan.axes[k].src))
    loops += [-1] * (num_axes - len(loops))
    into = plan.stage_strides if plan.staged else [axis.dst for axis in plan.axes]
    table = [KERNELS.index(plan.kernel), plan.unit, num_axes, plan.across, plan.run]
    table += [plan.staged, plan.streaming]
    for axis, step, loop in zip(plan.axes, into, loops):
        table += [axis.length, axis.box, axis.dst, axis.src, step, loop]
    numbers = np.array(table, np.int64)
    return _Job(
        table=numbers,
        address=numbers.ctypes.data,
        like=LIKE[1 << min(plan.unit, 16).bit_length() - 1],
        num_boxes=plan.num_boxes,
        num_bytes=plan.num_bytes,
        stage_bytes=plan.stage_bytes if plan.staged else 0,
        dst_start=plan.dst_start,
        src_start=plan.src_start,
        alone=plan.in_order or plan.num_boxes == 1,
    )


@lru_cache(maxsize=1024)
def _prepare(
    shape: tuple[int, ...],
    dst_strides: tuple[int, ...],
    src_strides: tuple[int, ...],
    itemsize: int,
    step: int,
    on_line: bool,
) -> _Job:
    """Strides count `step` bytes: torch's are in elements, numpy's in bytes."""
    dst_strides = tuple(step * stride for stride in dst_strides)
    src_strides = tuple(step * stride for stride in src_strides)
    return _job(plan(shape, dst_strides, src_strides, itemsize, on_line=on_line))


def _part(job: _Job, target: int, source: int, begin: int, end: int) -> None:
    stage = memory.empty(job.stage_bytes) if job.stage_bytes else None
    room = 0 if stage is None else stage.data_ptr()
    _rearrange_kernel(target, source, room, job.address, begin, end, job.like)


def rearrange(dst: Array, src: Array) -> None:
    if isinstance(dst, Tensor):
        target, source, itemsize = dst.data_ptr(), src.data_ptr(), dst.element_size()
        strides = dst.stride(), src.stride()
        job = _prepare(dst.shape, *strides, itemsize, itemsize, target % LINE == 0)
    else:
        target, source = dst.ctypes.data, src.ctypes.data
        strides = dst.strides, src.strides
        job = _prepare(dst.shape, *strides, dst.itemsize, 1, target % LINE == 0)
    target += job.dst_start
    source += job.src_start
    if job.alone:
        _part(job, target, source, 0, job.num_boxes)
    elif job.num_bytes:
        in_threads(partial(_part, job, target, source), job.num_boxes, job.num_bytes)
