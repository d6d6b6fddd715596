"""The kernels compiled by Numba: the fast path on CPU.

Kernels release the GIL and are compiled once, into a cache on disk. `NUMBA_DISABLE_JIT=1` does not
apply to them, since they read raw addresses: to step through a kernel, take the reference set.

    layout    who gets each token, and the lists of rows
    rows      pack, scatter and localise: moving bytes, renaming experts
    reduce    the sum of combine
    quantize  to FP8 and back
    signals   for ranks that share memory
"""

from tokenyard.kernels.numba.layout import channel_prefix, layout, route
from tokenyard.kernels.numba.quantize import plan_from_fp8, plan_to_fp8
from tokenyard.kernels.numba.reduce import reduce
from tokenyard.kernels.numba.rows import localise, pack, scatter
from tokenyard.kernels.numba.signals import await_signals, raise_signals

__all__ = [
    "await_signals",
    "channel_prefix",
    "layout",
    "localise",
    "pack",
    "plan_from_fp8",
    "plan_to_fp8",
    "raise_signals",
    "reduce",
    "route",
    "scatter",
]
