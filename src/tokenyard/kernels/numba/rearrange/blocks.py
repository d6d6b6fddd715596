"""target[i, j] = source[i, j] for two axes, in the ways that `kernels.rearrange_plan` names.

I is the last axis of the plan, which runs along dst; J the one across, which runs along src. n_I is
the length of I, t_I and s_I are its strides in bytes at the target and at the source; n_IJ, t_IJ
and s_IJ are those of both axes. A `like` argument is an empty array; its items are as wide as what
moves at a time.
"""

from __future__ import annotations

import numpy as np

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.pointers import copy_bytes
from tokenyard.kernels.numba.llvm.transpose import (
    deinterleave_2,
    deinterleave_3,
    deinterleave_4,
    interleave_2,
    interleave_3,
    interleave_4,
    large_side,
    move,
    prefetch,
    transpose_large,
    transpose_small,
    transpose_streaming,
)
from tokenyard.kernels.rearrange_plan import LEAST_TILE
from tokenyard.wire.columns import LINE

# One compiled kernel serves each of these.
LIKE: dict[int, np.ndarray] = {
    1: np.empty(0, np.uint8),
    2: np.empty(0, np.uint16),
    4: np.empty(0, np.uint32),
    8: np.empty(0, np.uint64),
    16: np.empty(0, np.complex128),
}

KERNELS = ("runs", "tiles", "interleave", "deinterleave", "moves")
RUNS, TILES, INTERLEAVE, DEINTERLEAVE, _ = range(len(KERNELS))


@njit(nogil=True, inline="always")
def fill_block(kernel, target, t_IJ, source, s_IJ, n_IJ, next_source, streaming, unit, like):
    """`next_source` is where the source will be after this block. Streaming only helps tiles."""
    (t_I, t_J), (s_I, s_J), (n_I, n_J) = t_IJ, s_IJ, n_IJ
    least = LEAST_TILE // unit
    if kernel == RUNS:
        for j in range(n_J):
            copy_bytes(target + j * t_J, source + j * s_J, n_I)
    elif kernel == TILES and n_I >= least and n_J >= least:
        _transpose(target, t_J, source, s_I, n_I, n_J, next_source, streaming, like)
    elif kernel == INTERLEAVE and t_J == n_I * unit and n_J * unit >= LINE:
        _interleave(target, source, s_I, n_I, n_J, like)
    elif kernel == DEINTERLEAVE and s_I == n_J * unit and n_I * unit >= LINE:
        _deinterleave(target, t_J, source, n_I, n_J, like)
    else:  # also what is left of an axis, if the rest is too small
        _move(target, t_I, t_J, source, s_I, s_J, n_I, n_J, unit, like)


@njit(nogil=True, cache=True)
def _move(target, t_I, t_J, source, s_I, s_J, n_I, n_J, unit, like):
    """Unit by unit, the longer axis inside."""
    if n_I > n_J:
        n_I, n_J, t_I, t_J, s_I, s_J = n_J, n_I, t_J, t_I, s_J, s_I
    width = like.itemsize
    for _ in range(n_I):
        if unit == width:
            for j in range(n_J):
                move(target + j * t_J, source + j * s_J, like)
        elif unit <= 2 * width:  # two moves that meet or overlap
            for j in range(n_J):
                to, of = target + j * t_J, source + j * s_J
                move(to, of, like)
                move(to + unit - width, of + unit - width, like)
        else:
            for j in range(n_J):
                copy_bytes(target + j * t_J, source + j * s_J, unit)
        target += t_I
        source += s_I


@njit(nogil=True, cache=True)
def _transpose(target, t_J, source, s_I, n_I, n_J, next_source, streaming, like):
    """By large squares, along src, while what lies below them is fetched; the edges by small ones.

    Where squares are whole lines of dst, they are streamed.
    """
    unit = like.itemsize
    side = large_side(unit) // unit
    far = abs(s_I) >= 2 * LINE  # if rows are near each other, the machine fetches them by itself
    end_I, end_J = n_I - n_I % side, n_J - n_J % side
    if end_I == 0 or end_J == 0:
        _transpose_small(target, t_J, source, s_I, 0, n_I, 0, n_J, like)
        return
    lines = streaming and side * unit == LINE and (target | t_J | n_I * unit) % LINE == 0
    if lines:
        end_J = n_J  # the last squares overlap those before
    for i in range(0, end_I, side):
        below = source + (i + side) * s_I if i + side < n_I else next_source
        for start in range(0, end_J, side):
            j = min(start, n_J - side)
            if far:
                for k in range(side):
                    prefetch(below + k * s_I + j * unit)
            to, of = target + i * unit + j * t_J, source + i * s_I + j * unit
            if lines:
                transpose_streaming(to, t_J, of, s_I, like)
            else:
                transpose_large(to, t_J, of, s_I, like)
    _transpose_small(target, t_J, source, s_I, end_I, n_I, 0, n_J, like)
    _transpose_small(target, t_J, source, s_I, 0, end_I, end_J, n_J, like)


@njit(nogil=True, cache=True)
def _transpose_small(target, t_J, source, s_I, begin_I, end_I, begin_J, end_J, like):
    """Part of a block. The last squares overlap those before, or what is before the part."""
    unit = like.itemsize
    side = LEAST_TILE // unit
    for start_I in range(begin_I, end_I, side):
        i = min(start_I, end_I - side)
        for start_J in range(begin_J, end_J, side):
            j = min(start_J, end_J - side)
            to, of = target + i * unit + j * t_J, source + i * s_I + j * unit
            transpose_small(to, t_J, of, s_I, like)


@njit(nogil=True, cache=True)
def _interleave(target, source, s_I, n_I, n_J, like):
    """n_I streams into one, 64 bytes of each at a time; the last ones overlap those before."""
    unit = like.itemsize
    size = LINE // unit
    for start in range(0, n_J, size):
        j = min(start, n_J - size)
        to, of = target + j * n_I * unit, source + j * unit
        if n_I == 2:
            interleave_2(to, of, s_I, like)
        elif n_I == 3:
            interleave_3(to, of, s_I, like)
        else:
            interleave_4(to, of, s_I, like)


@njit(nogil=True, cache=True)
def _deinterleave(target, t_J, source, n_I, n_J, like):
    """One stream into n_J, 64 bytes of each at a time; the last ones overlap those before."""
    unit = like.itemsize
    size = LINE // unit
    for start in range(0, n_I, size):
        i = min(start, n_I - size)
        to, of = target + i * unit, source + i * n_J * unit
        if n_J == 2:
            deinterleave_2(to, of, t_J, like)
        elif n_J == 3:
            deinterleave_3(to, of, t_J, like)
        else:
            deinterleave_4(to, of, t_J, like)
