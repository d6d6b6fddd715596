"""Writing rows into other ranks' memory, and the flags by which ranks wait for each other.

Memory is given as addresses: a peer's has no tensor here. Rows are written by one kernel and the
flags after it by another, on the same stream, so that all of the first is done; the flag itself is
a release at system scope, and a waiting rank acquires at system scope. A wait ends after so many
looks, and leaves the first rank that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.triton.launch import blocks, launch, numbers, power_of_two, words
from tokenyard.types import Route

_TILE = 1024  # elements of a row that are moved at once


@triton.jit
def _put_kernel(
    x,
    targets,
    copy_start,
    copy_rank,
    copy_slot,
    num_tokens,
    width,
    CHUNK: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A chunk of tokens: each row is read once, and written to its slot at each of its ranks.

    Targets are where this rank's first row goes at each rank.
    """
    first = tl.program_id(0).to(tl.int64) * CHUNK
    x = x.to(tl.pointer_type(ELEMENT))
    size: tl.constexpr = ELEMENT.primitive_bitwidth // 8 * GROUP
    for i in range(CHUNK):
        token = first + i
        if token < num_tokens:
            begin, end = tl.load(copy_start + token), tl.load(copy_start + token + 1)
            for at in range(0, width * GROUP, COLUMNS):
                columns = at + tl.arange(0, COLUMNS)
                inside = columns < width * GROUP
                values = tl.load(x + token * width * GROUP + columns, mask=inside)
                for copy in range(begin, end):
                    target = tl.load(targets + tl.load(copy_rank + copy))
                    slot = tl.load(copy_slot + copy).to(tl.int64)
                    row = target.to(tl.pointer_type(ELEMENT)) + slot * width * GROUP
                    tl.store(tl.multiple_of(row, size) + columns, values, mask=inside)


def put(x_TB: Tensor, route: Route, targets: Sequence[int], chunk: int) -> None:
    """Each token's bytes into its slot at each of its ranks; `chunk` tokens a program."""
    num_tokens, num_bytes = x_TB.shape
    granule = math.gcd(16, num_bytes, x_TB.data_ptr(), *targets)
    element, group, _ = words(granule)
    launch(
        _put_kernel,
        (blocks(num_tokens, chunk),),
        x_TB,
        numbers(targets, x_TB.device),
        route.copy_start,
        route.copy_rank,
        route.copy_slot,
        num_tokens,
        num_bytes // granule,
        CHUNK=chunk,
        ELEMENT=element,
        GROUP=group,
        COLUMNS=min(_TILE, power_of_two(num_bytes // granule * group)),
    )


# An epoch is another number at every call, and no reason to compile again.
@triton.jit(do_not_specialize=["num_flags", "epoch"])
def _raise_kernel(flags, num_flags, epoch):
    for i in range(num_flags):
        flag = tl.load(flags + i).to(tl.pointer_type(tl.int64))
        tl.atomic_store(flag, epoch.to(tl.int64), sem="release", scope="sys")


def raise_flags(flags: Sequence[int], epoch: int, device: torch.device) -> None:
    """Say to others, at these addresses, that all was done that this stream did before."""
    launch(_raise_kernel, (1,), numbers(flags, device), len(flags), epoch)


@triton.jit(do_not_specialize=["num_flags", "epoch", "first", "patience"])
def _await_kernel(flags, num_flags, epoch, missing, first, patience):
    found = first
    waiting = True
    while waiting & (found < num_flags):
        flag = tl.load(flags + found).to(tl.pointer_type(tl.int64))
        looks = 0
        value = tl.atomic_load(flag, sem="acquire", scope="sys")
        while (value < epoch) & (looks < patience):
            value = tl.atomic_load(flag, sem="acquire", scope="sys")
            looks += 1
        waiting = value >= epoch
        found += waiting.to(tl.int32)
    tl.store(missing, found)


def await_flags(
    flags: Sequence[int], epoch: int, missing: Tensor, first: int, patience: int
) -> None:
    """Wait for flags first.. to reach the epoch. `missing` [1] int32 is the first that did not, or
    their number; it may be host memory that the device can write.
    """
    device = missing.device
    launch(_await_kernel, (1,), numbers(flags, device), len(flags), epoch, missing, first, patience)
