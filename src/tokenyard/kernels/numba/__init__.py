"""The kernels compiled by Numba: the fast path on CPU.

Kernels release the GIL and are compiled once, into a cache on disk. `NUMBA_DISABLE_JIT=1` does not
apply to them, since they read raw addresses: to step through a kernel, take the reference set.

    layout     who gets each token, and the lists of rows
    rows       pack, scatter and localise: moving bytes, renaming experts
    reduce     the sum of combine
    align      pairs by expert, in whole blocks
    permute    rows by local expert, and back
    rearrange  copies between any two strides
    quantize   to FP8 and back
    signals    for ranks that share memory
    slots      the low-latency mode; slot_calls makes whole calls of it for shared memory
    ring       the same, through a fixed amount of it: the protocol and its two uses
"""

from tokenyard.kernels.numba.align import align
from tokenyard.kernels.numba.layout import layout, route
from tokenyard.kernels.numba.permute import place, spread, unpermute
from tokenyard.kernels.numba.permute_backward import unpermute_backward
from tokenyard.kernels.numba.quantize import plan_from_fp8, plan_to_fp8
from tokenyard.kernels.numba.rearrange import rearrange
from tokenyard.kernels.numba.reduce import reduce, reduce_at
from tokenyard.kernels.numba.ring import make_rings, ring_bytes, ring_slots
from tokenyard.kernels.numba.ring_combine import plan_ring_combine, ring_combine
from tokenyard.kernels.numba.ring_dispatch import plan_ring_dispatch, ring_dispatch
from tokenyard.kernels.numba.rows import localise, pack, scatter
from tokenyard.kernels.numba.signals import await_signals, meet, post
from tokenyard.kernels.numba.slot_calls import (
    await_slots,
    combine_calls,
    dispatch_calls,
    find_ahead,
    find_failure,
    signal,
)
from tokenyard.kernels.numba.slots import fill_slots, pick_slots, stage_back, stage_slots, sum_slots

__all__ = [
    "align",
    "await_signals",
    "await_slots",
    "combine_calls",
    "dispatch_calls",
    "fill_slots",
    "find_ahead",
    "find_failure",
    "layout",
    "localise",
    "make_rings",
    "meet",
    "pack",
    "pick_slots",
    "place",
    "plan_from_fp8",
    "plan_ring_combine",
    "plan_ring_dispatch",
    "plan_to_fp8",
    "post",
    "rearrange",
    "reduce",
    "reduce_at",
    "ring_bytes",
    "ring_combine",
    "ring_dispatch",
    "ring_slots",
    "route",
    "scatter",
    "signal",
    "spread",
    "stage_back",
    "stage_slots",
    "sum_slots",
    "unpermute",
    "unpermute_backward",
]
