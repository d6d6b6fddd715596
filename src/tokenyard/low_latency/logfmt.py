"""Combines with use_logfmt=True: rows keep what DeepEP's 10-bit logarithms keep of them.

The rank that gives rows back encodes and decodes them at once, and they travel as the float32
numbers that a receiver would decode (`spec.logfmt`). So sums are those of DeepEP's format, to the
bit. Fewer bytes do not travel: where ranks share memory, packing takes longer than it saves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.kernels import Kernels
from tokenyard.low_latency.handle import LowLatencyHandle
from tokenyard.runtime import memory
from tokenyard.wire.verdicts import LOW

_BLOCK = 512  # elements that DeepEP casts together, at least


def check(y_LSD: Tensor, zero_copy: bool) -> None:
    validate.require(
        not zero_copy, "use_logfmt and zero_copy are both True, want one at most: rows are cast"
    )
    validate.require(
        y_LSD.dtype is torch.bfloat16,
        f"x is {y_LSD.dtype} with use_logfmt=True, want torch.bfloat16",
    )
    validate.require(
        y_LSD.shape[2] % _BLOCK == 0,
        f"x has hidden size {y_LSD.shape[2]}, want a multiple of {_BLOCK} with use_logfmt=True",
    )


def cast(kernels: Kernels, y_LSD: Tensor, handle: LowLatencyHandle) -> Tensor:
    """[L, S, D] float32: the rows that are in use, as their receivers decode them."""
    out_LSD = memory.empty(*y_LSD.shape, dtype=torch.float32)
    for y_SD, out_SD, counts_R in zip(y_LSD, out_LSD, handle.ranges & LOW):
        num_rows = int(counts_R.sum())
        if num_rows:
            kernels.logfmt(y_SD[:num_rows], out_SD[:num_rows])
    return out_LSD


def round_sums(sums_TD: Tensor, out_TD: Tensor) -> None:
    with torch.inference_mode():  # out may have been made in it, which writing to it needs
        out_TD.copy_(sums_TD)
