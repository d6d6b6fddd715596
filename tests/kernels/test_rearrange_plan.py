"""A plan moves every byte once, wherever it cuts the axes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenyard.kernels.rearrange_plan import Plan, plan
from tokenyard.wire.columns import LINE


def offsets(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> np.ndarray:
    """Of every byte, by index."""
    places = np.zeros(1, np.int64)
    for length, stride in zip((*shape, itemsize), (*strides, 1)):
        places = (places[:, None] + np.arange(length) * stride).reshape(-1)
    return places


def moves(made: Plan) -> dict[int, int]:
    """{place in dst: place in src} of every byte, box by box."""
    found: dict[int, int] = {}
    blocks = [-(-axis.length // axis.box) for axis in made.axes]
    for box in np.ndindex(*blocks):
        starts = [index * axis.box for index, axis in zip(box, made.axes)]
        sizes = [min(a.box, a.length - start) for start, a in zip(starts, made.axes)]
        dst, src = made.dst_start, made.src_start
        dst += sum(start * axis.dst for start, axis in zip(starts, made.axes))
        src += sum(start * axis.src for start, axis in zip(starts, made.axes))
        to = dst + offsets(tuple(sizes), tuple(axis.dst for axis in made.axes), made.unit)
        of = src + offsets(tuple(sizes), tuple(axis.src for axis in made.axes), made.unit)
        assert not found.keys() & set(to.tolist())
        found.update(zip(to.tolist(), of.tolist()))
    return found


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    itemsize = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=5)))
    both = []
    for _ in range(2):
        strides, step = [0] * len(shape), itemsize
        for axis in draw(st.permutations(range(len(shape)))):
            strides[axis] = step * draw(st.sampled_from([1, 1, 1, -1, -1, 2]))
            step = abs(strides[axis]) * shape[axis]
        both.append(tuple(strides))
    return shape, both[0], both[1], itemsize


@given(layout=layouts(), stream_from=st.sampled_from([0, 1 << 20]))
@settings(max_examples=300, deadline=None)
def test_every_byte_moves_once(layout: tuple, stream_from: int) -> None:
    shape, dst, src, itemsize = layout
    want = dict(zip(offsets(shape, dst, itemsize).tolist(), offsets(shape, src, itemsize).tolist()))
    assert moves(plan(*layout, stream_from=stream_from)) == want


def test_long_axes_are_cut_and_covered() -> None:
    made = plan((70, 3000), (1, 70), (3000, 1), 1, stream_from=0)
    assert made.num_boxes > 1
    assert moves(made) == {r + 70 * c: 3000 * r + c for r in range(70) for c in range(3000)}


def contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[k + 1 :]) for k in range(len(shape)))


def permuted(shape: tuple[int, ...], axes: tuple[int, ...], itemsize: int) -> Plan:
    """To contiguous memory from a permuted view of contiguous memory."""
    strides = contiguous(shape, itemsize)
    new = tuple(shape[axis] for axis in axes)
    return plan(new, contiguous(new, itemsize), tuple(strides[axis] for axis in axes), itemsize)


@pytest.mark.parametrize(
    "shape, axes, itemsize, kernel, unit, lengths, staged",
    [
        ((8192, 4096), (0, 1), 4, "runs", 1, [8192 * 4096 * 4], False),
        ((8192, 4096), (1, 0), 4, "tiles", 4, [4096, 8192], False),
        ((8191, 4093), (1, 0), 2, "tiles", 2, [4093, 8191], True),
        ((64, 512, 8, 128), (0, 2, 1, 3), 4, "runs", 1, [64, 8, 512, 512], False),
        ((64, 512, 8, 30), (0, 2, 1, 3), 4, "runs", 1, [64, 8, 512, 120], True),
        ((64, 512, 8, 4), (0, 2, 1, 3), 4, "moves", 16, [64, 8, 512], True),
        ((16, 3, 512, 512), (0, 2, 3, 1), 4, "interleave", 4, [16, 512 * 512, 3], True),
        ((16, 512, 512, 3), (0, 3, 1, 2), 2, "deinterleave", 2, [16, 3, 512 * 512], True),
        ((32, 32, 32, 32, 32), (4, 3, 2, 1, 0), 4, "tiles", 4, [32] * 5, True),
        ((100, 1, 200), (2, 1, 0), 4, "tiles", 4, [200, 100], False),  # too little to stream
        ((400, 5, 300), (1, 2, 0), 16, "moves", 16, [1500, 400], True),
    ],
)
def test_kernel_for(
    shape: tuple, axes: tuple, itemsize: int, kernel: str, unit: int, lengths: list, staged: bool
) -> None:
    made = permuted(shape, axes, itemsize)
    assert (made.kernel, made.unit, made.staged) == (kernel, unit, staged)
    assert [axis.length for axis in made.axes] == lengths
    assert made.num_bytes == math.prod(shape) * itemsize


def test_runs_beside_a_line_are_staged() -> None:
    layout = ((512, 100, 64), (25600, 256, 4), (256, 131072, 4), 4)
    assert not plan(*layout).staged
    assert plan(*layout, on_line=False).staged


def test_dst_that_may_overlap_itself_keeps_its_order() -> None:
    made = plan((3, 4), (4, 4), (16, 4), 4)
    assert made.in_order
    assert "in_order" in str(made)
    assert not plan((3, 4), (4, -12), (16, 4), 4).in_order


def test_a_stage_has_a_spare_line_before_each_run() -> None:
    made = permuted((8191, 4093), (1, 0), 4)
    assert made.staged
    assert made.pitch >= LINE + made.unit * made.axes[-1].box
    assert made.stage_strides == (made.pitch, 4)
    assert made.stage_bytes == made.pitch * made.axes[0].box


def test_nothing_moves_nothing() -> None:
    for made in (plan((3, 0), (0, 4), (0, 4), 4), plan((3,), (0,), (0,), 0)):
        assert (made.num_bytes, made.num_boxes) == (0, 0)
