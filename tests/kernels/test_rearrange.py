"""rearrange against `spec`, and against numpy where there is too much for the specification.

What is compared is always all of dst's memory: nothing beside the view may change.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit, types
from torch import Tensor

import tokenyard
from tests.cases.kernel_sets import SETS
from tests.cases.lanes import random_cases
from tokenyard import spec
from tokenyard.kernels import rearrange_plan as planning
from tokenyard.kernels.base import interprets_triton
from tokenyard.kernels.numba.llvm.transpose import transpose_streaming
from tokenyard.kernels.numba.rearrange.boxes import _job, _part
from tokenyard.testing import assert_same, poisoned

ITEMS = ["u1", "u2", "V3", "u4", "V5", "u8", "V12", "c16", "V20", "V32", "V40"]


@contextmanager
def small_boxes() -> Iterator[None]:
    """Boxes of a few bytes, and all of them streamed where dst has whole lines."""
    small = {
        "TILE_COLUMNS": 40,
        "TILE_RUN": 96,
        "RUNS_SRC": 128,
        "RUNS_DST": 96,
        "LEAST_BOX": 256,
        "WHOLE_BOX": 256,
        "SHORT_RUN": 64,
    }
    before = {name: getattr(planning, name) for name in small}
    try:
        vars(planning).update(small)
        yield
    finally:
        vars(planning).update(before)


def in_small_boxes(dst: np.ndarray, src: np.ndarray, cut: float) -> planning.Plan:
    """The kernel, given its boxes in two parts as two threads would be."""
    with small_boxes():
        target = dst.ctypes.data
        made = planning.plan.__wrapped__(
            dst.shape,
            dst.strides,
            src.strides,
            dst.itemsize,
            on_line=target % 64 == 0,
            stream_from=0,
        )
    job = _job(made)
    places = target + job.dst_start, src.ctypes.data + job.src_start
    middle = 0 if made.in_order else int(cut * job.num_boxes)
    with poisoned():
        _part(job, *places, middle, job.num_boxes)
        _part(job, *places, 0, middle)
    return made


class Layout:
    """A view with shuffled axes, steps of either sign and margins, and the memory around it."""

    def __init__(
        self,
        shape: tuple[int, ...],
        item: str,
        axes: list[int],
        steps: list[int],
        margins: list[int],
        shift: int,
        seed: int,
    ) -> None:
        base_shape = [shape[axis] * abs(steps[axis]) + margins[axis] for axis in axes]
        itemsize = np.dtype(item).itemsize
        room = math.prod(base_shape) * itemsize
        # Some bytes before, some after; and the shift puts dst on a line's boundary, or beside it.
        memory = np.random.default_rng(seed).integers(0, 256, room + 320, np.uint8)
        start = 128 - memory.ctypes.data % 64 + shift
        base = memory[start : start + room].view(item).reshape(base_shape)
        view = base.transpose(np.argsort(axes)) if axes else base
        stepped: Any = (*(slice(None, None, step) for step in steps), ...)
        view = view[stepped]
        self.memory = memory
        cut: Any = (*(slice(0, length) for length in shape), ...)
        self.view = view[cut]


def layout(draw: st.DrawFn, shape: tuple[int, ...], item: str) -> Layout:
    axes = draw(st.permutations(range(len(shape))))
    step = st.sampled_from([1] * 12 + [2, -1, -1, -3])
    steps = [draw(step) for _ in shape]
    margins = [draw(st.sampled_from([0] * 9 + [7])) for _ in shape]
    shift = draw(st.sampled_from([0, 0, 1, 16, 36]))
    return Layout(shape, item, axes, steps, margins, shift, draw(st.integers(0, 9)))


@st.composite
def pairs(
    draw: st.DrawFn, most: int, lengths: st.SearchStrategy[int], max_axes: int
) -> tuple[Layout, np.ndarray]:
    """dst and src, of `most` elements at most; src repeats itself along some axes."""
    item = draw(st.sampled_from(ITEMS))
    shape: list[int] = []
    for _ in range(draw(st.integers(0, max_axes))):
        shape.append(min(draw(lengths), most // max(1, math.prod(shape))))
    dst = layout(draw, tuple(shape), item)
    once = [1 if draw(st.integers(0, 9)) == 0 else length for length in shape]
    src = layout(draw, tuple(once), item).view
    return dst, np.broadcast_to(src, tuple(shape))


Move = Callable[[np.ndarray, np.ndarray], object]


def check(dst: Layout, src: np.ndarray, move: Move, reference: Move = np.copyto) -> None:
    before = dst.memory.copy()
    reference(dst.view, src)
    want = dst.memory.tobytes()
    dst.memory[:] = before
    move(dst.view, src)
    assert dst.memory.tobytes() == want


@pytest.mark.parametrize("name", SETS)
@given(case=pairs(60, st.integers(0, 7), 8))
@settings(max_examples=random_cases(100 if interprets_triton() else 300), deadline=None)
def test_agrees_with_spec(name: str, case: tuple[Layout, np.ndarray]) -> None:
    check(*case, partial(tokenyard.rearrange, kernels=name), spec.rearrange)


# Squares of 16 to 64, a few streams, and what is neither.
LENGTHS = st.one_of(
    st.sampled_from([2, 3, 4]), st.sampled_from([8, 16, 32, 64, 100]), st.integers(1, 300)
)


@given(case=pairs(6000, LENGTHS, 4), cut=st.floats(0, 1))
@settings(max_examples=random_cases(400), deadline=None)
def test_small_boxes_agree_with_numpy(case: tuple[Layout, np.ndarray], cut: float) -> None:
    check(*case, partial(in_small_boxes, cut=cut))


def test_a_box_of_one_run_does_not_go_on_into_a_box_of_many() -> None:
    """Runs of 203 with gaps, 81 of them in boxes of 40; no gap after the last of the 81."""
    src = numbered((5, 203, 81), "u2").transpose(0, 2, 1)
    memory = np.zeros(5 * 81 * 240, "u2")
    strides = (2 * (80 * 240 + 203), 2 * 240, 2)
    dst = np.lib.stride_tricks.as_strided(memory, src.shape, strides)
    want = memory.copy()
    np.lib.stride_tricks.as_strided(want, src.shape, strides)[...] = src
    made = in_small_boxes(dst, src, cut=0)
    assert made.staged
    assert [axis.box for axis in made.axes] == [1, 40, 48]
    assert memory.tobytes() == want.tobytes()


def numbered(shape: tuple[int, ...], item: str) -> np.ndarray:
    """Bytes that repeat after a prime number of them: no two neighbours look the same."""
    size = math.prod(shape) * np.dtype(item).itemsize
    return np.resize(np.arange(251, dtype=np.uint8), size).view(item).reshape(shape)


PERMUTATIONS = [
    ((1031, 1037), (1, 0)),
    ((512, 1024), (1, 0)),
    ((40, 70, 260), (2, 1, 0)),
    ((3, 130, 9, 257), (0, 2, 1, 3)),
    ((8, 8, 8, 8, 8, 32), (5, 4, 3, 2, 1, 0)),
    ((5, 3, 90, 1000), (0, 2, 3, 1)),
    ((5, 90, 1000, 3), (0, 3, 1, 2)),
    ((2, 500_001), (1, 0)),
    ((300_001, 4), (1, 0)),
    ((7, 9, 11, 13, 17, 19), (5, 1, 3, 0, 2, 4)),
]


@pytest.mark.parametrize("item", ["u1", "u2", "u4", "u8", "V3", "c16"])
@pytest.mark.parametrize("shape, axes", PERMUTATIONS, ids=str)
def test_permutations(shape: tuple[int, ...], axes: tuple[int, ...], item: str) -> None:
    """Large enough for streaming stores, in rows of a wider array."""
    src = numbered(shape, item).transpose(axes)
    memory = np.zeros((*src.shape[:-1], src.shape[-1] + 3), item)
    for dst in (np.zeros(src.shape, item), memory[..., 2:-1]):
        tokenyard.rearrange(dst, src)
        assert dst.tobytes() == src.tobytes()
    assert not memory[..., :2].tobytes().strip(b"\0")
    assert not memory[..., -1:].tobytes().strip(b"\0")


TORCH_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.complex128,
)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_tensors(name: str, dtype: torch.dtype) -> None:
    src = torch.randint(0, 2, (5, 70, 33)).to(dtype).permute(2, 0, 1)
    memory = torch.zeros(35, 5, 80, dtype=dtype)
    before = memory._version
    tokenyard.rearrange(memory[1:-1, :, 4:74], src, kernels=name)
    want = torch.zeros(35, 5, 80, dtype=dtype)
    want[1:-1, :, 4:74] = src
    assert torch.equal(memory, want)
    assert memory._version > before  # or autograd would not know
    tokenyard.rearrange(memory[0, :, :70].t(), src[7].t(), kernels=name)
    assert torch.equal(memory[0, :, :70], src[7])


@pytest.mark.parametrize("name", SETS)
def test_every_nan_keeps_its_bits(name: str) -> None:
    bits = torch.arange(-32768, 32768).to(torch.int16).view(256, 256)
    for dtype in (torch.bfloat16, torch.float16):
        dst = torch.zeros(256, 256, dtype=dtype)
        tokenyard.rearrange(dst, bits.view(dtype).t(), kernels=name)
        assert torch.equal(dst.view(torch.int16), bits.t())


@pytest.mark.parametrize("name", SETS)
def test_conjugates_and_negatives_are_values(name: str) -> None:
    z = torch.randn(3, 4, dtype=torch.complex64)
    for src in (z.conj(), z.mH.t(), z.conj().imag):
        dst = torch.zeros(3, 4, dtype=src.dtype)
        tokenyard.rearrange(dst, src, kernels=name)
        assert torch.equal(dst, src)
    dst = torch.zeros(3, 4, dtype=torch.complex64)
    tokenyard.rearrange(dst.conj(), z, kernels=name)
    assert torch.equal(dst, z.conj())


@pytest.mark.parametrize("name", SETS)
def test_elements_of_dst_that_share_memory_end_with_the_last(name: str) -> None:
    src = torch.arange(1, 13).view(3, 4)
    for strides in ((1, 1), (2, 1), (1, 2), (3, 2)):
        got, want = torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
        tokenyard.rearrange(got.as_strided((3, 4), strides), src, kernels=name)
        spec.rearrange(want.as_strided((3, 4), strides), src)
        assert_same(got, want)


@pytest.mark.parametrize("num_threads", [2, 5])
@pytest.mark.parametrize("shape", [(2048, 4096), (2047, 4099), (3, 2_900_001)], ids=str)
def test_threads_do_not_change_bytes(num_threads: int, shape: tuple[int, int]) -> None:
    src = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32).t()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        dst = torch.zeros(src.shape, dtype=torch.int32)
        tokenyard.rearrange(dst, src)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(dst, src)


def test_more_than_2_to_the_31_bytes() -> None:
    side = 46_400
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 2 * side * side:
        pytest.skip("needs 4 GB")
    assert side * side > 2**31
    row = numbered((side,), "u1")
    big = np.empty((side, side), np.uint8)
    tokenyard.rearrange(big.T, np.broadcast_to(row[:, None], big.shape))  # each row is `row`
    for start in range(0, side, 4096):
        assert (big[start : start + 4096] == row).all()
    big[-1, -5:] = [1, 2, 3, 4, 5]
    column = np.zeros((5, side), np.uint8)
    tokenyard.rearrange(column, big.T[-5:])
    assert column[:, -1].tolist() == [1, 2, 3, 4, 5]
    assert (column[:, :-1] == row[-5:, None]).all()


REFUSED = [
    (torch.zeros(2, 3), torch.zeros(3, 2), "src has shape (3, 2), want dst's (2, 3)"),
    (torch.zeros(2), torch.zeros(2).int(), "src is torch.int32, want dst's torch.float32"),
    (np.zeros(2, "f4"), np.zeros(2, "f8"), "src is float64, want dst's float32"),
    (np.zeros(2, ">f4"), np.zeros(2, "<f4"), "src is float32, want dst's >f4"),
    (np.zeros(2), torch.zeros(2), "src is a Tensor, want a ndarray like dst"),
    (torch.zeros(2), np.zeros(2), "src is a ndarray, want a Tensor like dst"),
    ([0.0], [1.0], "dst is a list, want a Tensor or an ndarray"),
    (
        torch.zeros(3).expand(2, 3),
        torch.zeros(2, 3),
        "dst has stride 0 on axis 0 of length 2, want length 1",
    ),
    (
        np.broadcast_to(np.zeros((2, 1)), (2, 3)),
        np.zeros((2, 3)),
        "dst has stride 0 on axis 1 of length 3, want length 1",
    ),
    (
        np.frombuffer(b"ab", "u1"),
        np.zeros(2, "u1"),
        "dst is read-only, want a writeable array",
    ),
    (
        np.array([None]),
        np.array([None]),
        "dst is object, want a dtype without references",
    ),
    (
        torch.zeros(2, device="meta"),
        torch.zeros(2),
        "src is on cpu, want dst's meta",
    ),
    (
        torch.zeros([1] * 65),
        torch.zeros([1] * 65),
        "dst has 65 axes, want at most 64",
    ),
    (
        torch.zeros(2),
        torch.zeros(2, requires_grad=True),
        "src requires grad, want src.detach() or torch.no_grad()",
    ),
    (
        torch.zeros(2, requires_grad=True),
        torch.zeros(2),
        "dst requires grad, want dst.detach() or torch.no_grad()",
    ),
]


@pytest.mark.parametrize("dst, src, message", REFUSED, ids=[case[2] for case in REFUSED])
def test_refuses(dst: Tensor, src: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        tokenyard.rearrange(dst, src)


def test_refuses_memory_that_src_and_dst_share() -> None:
    text = "^src shares memory with dst, want memory of its own$"
    line, square = np.arange(12), torch.zeros(4, 4)
    with pytest.raises(ValueError, match=text):
        tokenyard.rearrange(square, square.t())
    with pytest.raises(ValueError, match=text):
        tokenyard.rearrange(line[3:], line[:-3])
    with pytest.raises(ValueError, match=text):
        tokenyard.rearrange(line[::-2], line[5::-1])
    assert line.tolist() == list(range(12))
    tokenyard.rearrange(line[::2], line[1::2])  # between each other
    assert line.tolist() == [1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11]
    square[:, 1] = 7
    tokenyard.rearrange(square[:, 3], square[:, 1])
    assert square[:, 3].tolist() == [7] * 4


def test_unknown_set_names_those_there_are() -> None:
    one: Any
    for one in (torch.zeros(2), np.zeros(2)):
        with pytest.raises(ValueError, match="unknown kernel set 'nmba'; available: auto, numba,"):
            tokenyard.rearrange(
                one, one.copy() if isinstance(one, np.ndarray) else one.clone(), kernels="nmba"
            )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")
def test_squares_are_written_around_the_cache() -> None:
    @njit
    def kernel(target: Any, target_stride: Any, source: Any, source_stride: Any, like: Any) -> None:
        transpose_streaming(target, target_stride, source, source_stride, like)

    signature = (*[types.int64] * 4, types.Array(types.uint32, 1, "C"))
    kernel.compile(signature)
    assert re.search(r"\bv?movnt(dq|ps|pd)\b", kernel.inspect_asm(signature))
