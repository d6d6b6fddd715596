"""The kernels in Triton: for tensors on NVIDIA and AMD devices.

Nobody has run them on a device yet. What was shown without one, and how, is in docs/gpu.md: each
agrees with `spec` in Triton's interpreter, and compiles for five targets.

    launch     how kernels are started
    numbers    floats that have the same bits everywhere
    layout     who gets each token, and the lists of rows
    rows       pack, spread and localise: moving bytes, renaming experts
    sums       reduce and unpermute
    gradients  those of unpermute
    experts    align and place: pairs by expert
    rearrange  copies between any two strides
    quantize   to FP8 and back
    slots      the low-latency mode
    peers      rows into other ranks' memory, and flags
    ahead      all of it compiled without a device; `catalogue` says what
"""

from tokenyard.kernels.triton.experts import align, place
from tokenyard.kernels.triton.gradients import unpermute_backward
from tokenyard.kernels.triton.layout import layout, route
from tokenyard.kernels.triton.peers import await_flags, put, raise_flags
from tokenyard.kernels.triton.quantize import plan_from_fp8, plan_to_fp8
from tokenyard.kernels.triton.rearrange import rearrange
from tokenyard.kernels.triton.rows import localise, pack, spread
from tokenyard.kernels.triton.slots import (
    fill_slots,
    pick_slots,
    stage_back,
    stage_slots,
    sum_slots,
)
from tokenyard.kernels.triton.sums import reduce, reduce_at, unpermute

__all__ = [
    "align",
    "await_flags",
    "fill_slots",
    "layout",
    "localise",
    "pack",
    "pick_slots",
    "place",
    "plan_from_fp8",
    "plan_to_fp8",
    "put",
    "raise_flags",
    "rearrange",
    "reduce",
    "reduce_at",
    "route",
    "spread",
    "stage_back",
    "stage_slots",
    "sum_slots",
    "unpermute",
    "unpermute_backward",
]
