"""How a rearrangement is done, worked out from shapes and strides alone: no memory is touched.

A plan first brings the copy into a *normal form*: axes of length 1 are dropped, axes run along dst,
neighbours that are one axis in both are merged, and what is contiguous in both becomes the *unit*
that moves as a whole. Then it cuts the axes into *boxes*, each small enough for the cache and long
enough along both sides that lines are read and written whole. A box is the work that a thread takes
up at a time, and what a block of threads would take on a GPU.

    >>> print(plan((8192, 4096), (4, 32768), (16384, 4), 4))  # dst = src, dst stored by columns
    tiles of 4 bytes, 134217728 bytes in 512 boxes, streaming
      length 4096: dst stride 32768, src stride 4, box 1024, across
      length 8192: dst stride 4, src stride 16384, box 64, inner, run
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tokenyard.wire.columns import LINE

LONG_UNIT = 64  # from here on a unit is a run of bytes, copied by itself

# Below this dst may be read again from the cache; from here on it is written around it.
STREAM_FROM = 1 << 20
SHORT_RUN = 4 * LINE  # a shorter run of dst is mostly the ends of lines: not worth streaming

# What a box holds along dst and along src. Measured: 1024 columns of src read along their rows,
# 256 bytes of each row of dst; a box and its source then fit the second cache.
TILE_COLUMNS = 1024
TILE_RUN = 256
RUNS_SRC, RUNS_DST = 16 << 10, 4 << 10
LEAST_BOX = 32 << 10
WHOLE_BOX = 256 << 10  # as much is one box, if it is not streamed

MOST_AXES = 64  # as numpy and torch have it
LEAST_TILE = 16  # bytes on a side; see kernels/numba/shuffles.py
MOST_WOVEN = 4  # streams that the interleaving kernels know


class Axis(NamedTuple):
    length: int
    dst: int  # strides in bytes
    src: int
    box: int = 1  # steps along this axis in a box


@dataclass(frozen=True, kw_only=True)
class Plan:
    """dst[i, j, ...] = src[i, j, ...], the last axis of `axes` varying fastest in dst.

    kernel:
        runs          the last axis is bytes, contiguous in both: copy them
        tiles         inner is contiguous in dst, across in src: transpose squares
        interleave    tiles with a handful of rows of src, which alternate in dst
        deinterleave  the other way round
        moves         unit by unit
    """

    kernel: str
    unit: int  # bytes that move as a whole
    axes: tuple[Axis, ...]
    across: int  # the axis with the least stride in src, other than the last; -1 if there is none
    run: int  # axes[run:] of a box are contiguous in dst
    staged: bool  # a box is put together in the cache, then written line by line
    streaming: bool  # whole lines are written around the cache
    in_order: bool  # elements of dst may share memory: the last one written must win
    dst_start: int  # bytes from the first element to where the axes begin
    src_start: int

    @property
    def num_bytes(self) -> int:
        return self.unit * math.prod(axis.length for axis in self.axes)

    @property
    def num_boxes(self) -> int:
        return math.prod(-(-axis.length // axis.box) for axis in self.axes)

    @property
    def pitch(self) -> int:
        """Bytes from run to run of a staged box: a spare line, then the run.

        An odd number of lines, so that runs spread over all sets of a cache.
        """
        run = self.unit * math.prod(axis.box for axis in self.axes[self.run :])
        return LINE * (1 + -(-run // LINE) | 1)

    @property
    def stage_strides(self) -> tuple[int, ...]:
        """Strides of the axes in a staged box."""
        strides, step = [], self.pitch
        for axis in reversed(self.axes[: self.run]):
            strides.append(step)
            step *= axis.box
        return (*reversed(strides), *(axis.dst for axis in self.axes[self.run :]))

    @property
    def stage_bytes(self) -> int:
        return self.pitch * math.prod(axis.box for axis in self.axes[: self.run])

    def __str__(self) -> str:
        how = [name for name in ("staged", "streaming", "in_order") if getattr(self, name)]
        how = [word for word in how if word != "streaming" or not self.staged] or ["direct"]
        head = f"{self.kernel} of {self.unit} byte{'s' * (self.unit > 1)}, {self.num_bytes} bytes"
        lines = [f"{head} in {self.num_boxes} box{'es' * (self.num_boxes > 1)}, {', '.join(how)}"]
        for k, axis in enumerate(self.axes):
            roles = [", across"] if k == self.across else []
            roles += [", inner"] if k == len(self.axes) - 1 else []
            roles += [", run"] if k >= self.run and self.streaming else []
            lines.append(
                f"  length {axis.length}: dst stride {axis.dst}, src stride {axis.src}, "
                f"box {axis.box}{''.join(roles)}"
            )
        return "\n".join(lines)


@lru_cache(maxsize=1024)
def plan(
    shape: tuple[int, ...],
    dst_strides: tuple[int, ...],
    src_strides: tuple[int, ...],
    itemsize: int,
    *,
    on_line: bool = True,
    stream_from: int = STREAM_FROM,
) -> Plan:
    """Strides are in bytes and may have any sign. `on_line`: dst begins where a cache line does.

    >>> print(plan((2, 6, 1, 4), (96, 16, 16, 4), (160, 16, 0, 4), 4))
    runs of 1 byte, 192 bytes in 1 box, direct
      length 2: dst stride 96, src stride 160, box 2, across
      length 96: dst stride 1, src stride 1, box 96, inner
    >>> print(plan((16, 512, 512, 3), (3 << 20, 6144, 12, 4), (3 << 20, 2048, 4, 1 << 20), 4))
    interleave of 4 bytes, 50331648 bytes in 1536 boxes, staged
      length 16: dst stride 3145728, src stride 3145728, box 1
      length 262144: dst stride 12, src stride 4, box 2731, across, run
      length 3: dst stride 4, src stride 1048576, box 3, inner, run
    """
    if 0 in shape or itemsize == 0:
        return _NOTHING
    given = [Axis(*one) for one in zip(shape, dst_strides, src_strides) if one[0] > 1]
    in_order = not _is_injective(given, itemsize)
    axes, dst_start, src_start = (given, 0, 0) if in_order else _along_dst(given)
    axes, unit = _widen(_merge(axes), itemsize)
    across = -1 if in_order else _across(axes)
    if across >= 0 and axes[across].src == -unit:  # read it forwards, write it backwards
        length, dst, src, _ = axes[across]
        axes[across] = Axis(length, -dst, -src)
        dst_start += (length - 1) * dst
        src_start += (length - 1) * src

    kernel = _kernel(axes, across, unit)
    num_bytes = unit * math.prod(axis.length for axis in axes)
    streaming = not in_order and num_bytes >= stream_from and _dense(axes, unit) >= SHORT_RUN
    staged = streaming and _cuts_lines(axes, unit, kernel, on_line)
    if in_order:
        boxes = [1] * (len(axes) - 1) + [axes[-1].length]
    elif num_bytes <= WHOLE_BOX and not streaming:
        boxes = [axis.length for axis in axes]
    else:
        boxes = _boxes(axes, unit, kernel)
    axes = [axis._replace(box=box) for axis, box in zip(axes, boxes)]
    return Plan(
        kernel=kernel,
        unit=unit,
        axes=tuple(axes),
        across=across,
        run=_run(axes, unit) if staged else len(axes) - 1,
        staged=staged,
        streaming=streaming,
        in_order=in_order,
        dst_start=dst_start,
        src_start=src_start,
    )


_NOTHING = Plan(
    kernel="runs",
    unit=1,
    axes=(Axis(0, 1, 1),),
    across=-1,
    run=0,
    staged=False,
    streaming=False,
    in_order=False,
    dst_start=0,
    src_start=0,
)


def _is_injective(axes: Sequence[Axis], itemsize: int) -> bool:
    """Whether no two elements of dst share memory, as far as can be told at a glance.

    >>> _is_injective([Axis(3, 2, 0), Axis(2, -6, 0)], 2), _is_injective([Axis(3, 2, 0)], 4)
    (True, False)
    """
    extent = itemsize
    for axis in sorted(axes, key=lambda axis: abs(axis.dst)):
        if abs(axis.dst) < extent:
            return False
        extent += abs(axis.dst) * (axis.length - 1)
    return True


def _along_dst(axes: Sequence[Axis]) -> tuple[list[Axis], int, int]:
    """Turned so that dst's strides are positive, and sorted by them.

    >>> _along_dst([Axis(4, 8, 20), Axis(2, -32, 4)])
    ([Axis(length=2, dst=32, src=-4, box=1), Axis(length=4, dst=8, src=20, box=1)], -32, 4)
    """
    turned = [Axis(n, abs(dst), src if dst >= 0 else -src) for n, dst, src, _ in axes]
    backwards = [axis for axis in axes if axis.dst < 0]
    dst_start = sum((axis.length - 1) * axis.dst for axis in backwards)
    src_start = sum((axis.length - 1) * axis.src for axis in backwards)
    return sorted(turned, key=lambda axis: -axis.dst), dst_start, src_start


def _merge(axes: Iterable[Axis]) -> list[Axis]:
    """
    >>> _merge([Axis(2, 48, 80), Axis(3, 16, 16), Axis(4, 4, 4)])
    [Axis(length=2, dst=48, src=80, box=1), Axis(length=12, dst=4, src=4, box=1)]
    """
    merged: list[Axis] = []
    for axis in axes:
        steps = (axis.length * axis.dst, axis.length * axis.src)
        if merged and (merged[-1].dst, merged[-1].src) == steps:
            axis = Axis(merged.pop().length * axis.length, axis.dst, axis.src)
        merged.append(axis)
    return merged


def _widen(axes: list[Axis], unit: int) -> tuple[list[Axis], int]:
    """What is contiguous in both is one unit; a long one is an axis of bytes.

    >>> _widen([Axis(5, 40, 12), Axis(3, 4, 4)], 4), _widen([], 4)
    (([Axis(length=5, dst=40, src=12, box=1)], 12), ([Axis(length=4, dst=1, src=1, box=1)], 1))
    """
    if axes and axes[-1].dst == axes[-1].src == unit:
        unit *= axes[-1].length
        axes = axes[:-1]
    if unit < LONG_UNIT and axes:
        return axes, unit
    return [*axes, Axis(unit, 1, 1)], 1


def _across(axes: Sequence[Axis]) -> int:
    steps = [(abs(axis.src), k) for k, axis in enumerate(axes[:-1]) if axis.src]
    return min(steps)[1] if steps else -1


def _kernel(axes: Sequence[Axis], across: int, unit: int) -> str:
    inner, side = axes[-1], axes[across]
    if unit == inner.dst == inner.src == 1:  # single bytes would have been widened
        return "runs"
    if across < 0 or unit not in (1, 2, 4, 8) or not unit == inner.dst == side.src:
        return "moves"
    if inner.length <= MOST_WOVEN and side.dst == inner.length * unit:
        return "interleave"
    if side.length <= MOST_WOVEN and inner.src == side.length * unit:
        return "deinterleave"
    return "tiles" if min(inner.length, side.length) >= LEAST_TILE // unit else "moves"


def _dense(axes: Sequence[Axis], unit: int) -> int:
    """Bytes of dst that follow each other."""
    extent = unit
    for axis in reversed(axes):
        if axis.dst != extent:
            break
        extent *= axis.length
    return extent


def _cuts_lines(axes: Sequence[Axis], unit: int, kernel: str, on_line: bool) -> bool:
    """Whether runs or squares would write parts of lines."""
    *others, last = axes
    length = unit * last.length
    if on_line and length % LINE == 0 and all(axis.dst % LINE == 0 for axis in others):
        return not (kernel == "runs" or (kernel == "tiles" and unit > 1 and length >= SHORT_RUN))
    return kernel != "runs" or length < RUNS_DST


def _boxes(axes: Sequence[Axis], unit: int, kernel: str) -> list[int]:
    boxes = [1] * len(axes)
    by_dst = range(len(axes) - 1, -1, -1)
    by_src = sorted(by_dst, key=lambda k: abs(axes[k].src) or math.inf)
    along_src, along_dst = unit * TILE_COLUMNS, TILE_RUN
    if kernel == "runs":
        along_src, along_dst = RUNS_SRC, RUNS_DST
    _grow(boxes, axes, by_src, along_src // unit)
    _grow(boxes, axes, by_dst, along_dst // unit)
    most = math.prod(axis.length for axis in axes)
    while unit * math.prod(boxes) < LEAST_BOX and math.prod(boxes) < most:
        along_dst *= 2
        _grow(boxes, axes, by_dst, along_dst // unit)
    return boxes


def _grow(boxes: list[int], axes: Sequence[Axis], order: Iterable[int], units: int) -> None:
    """Take axes into the box, one after the other, until it has `units` along them.

    >>> boxes = [1, 1, 1]
    >>> _grow(boxes, [Axis(100, 0, 0), Axis(9, 0, 0), Axis(4, 0, 0)], (2, 1, 0), 72)
    >>> boxes
    [2, 9, 4]
    """
    have = 1
    for k in order:
        need = -(-units // have)
        # Up to twice as much is better than a rest.
        boxes[k] = max(boxes[k], axes[k].length if axes[k].length < 2 * need else need)
        have *= boxes[k]
        if boxes[k] < axes[k].length or have >= units:
            break


def _run(axes: Sequence[Axis], unit: int) -> int:
    """Where the last axes begin that are contiguous in dst, as far as a box has them."""
    extent = unit
    for k in range(len(axes) - 1, -1, -1):
        if axes[k].dst != extent:
            return k + 1
        if axes[k].box < axes[k].length:
            return k
        extent *= axes[k].length
    return 0
