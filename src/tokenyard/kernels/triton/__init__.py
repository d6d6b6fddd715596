"""The kernels in Triton: for tensors on NVIDIA and AMD devices.

Nobody has run them on a device yet. docs/guide/gpu.md has what was shown without one: each agrees
with `spec` in Triton's interpreter, and compiles for five targets (tools/triton_aot).

    launch       how kernels are started
    floats       floats that have the same bits everywhere
    layout       who gets each token, and the lists of rows
    rows         pack and localise: moving bytes, renaming experts
    reduce       the sum of combine
    align        pairs by expert, in whole blocks
    permute      rows by local expert, and back; permute_backward its gradients
    rearrange    copies between any two strides
    quantize     to FP8 and back
    symmetric    rows into other ranks' memory, and flags

The low-latency mode takes CPU tensors, so this set has none of its steps.
"""

from tokenyard.kernels.triton.align import align
from tokenyard.kernels.triton.layout import count, layout, route
from tokenyard.kernels.triton.permute import place, spread, unpermute
from tokenyard.kernels.triton.permute_backward import unpermute_backward
from tokenyard.kernels.triton.quantize import plan_from_fp8, plan_to_fp8
from tokenyard.kernels.triton.rearrange import rearrange
from tokenyard.kernels.triton.reduce import reduce, reduce_at
from tokenyard.kernels.triton.rows import localise, pack
from tokenyard.kernels.triton.symmetric import await_flags, put, raise_flags

shares_memory = False
puts_rows = True
counts_on_device = True

__all__ = [
    "align",
    "await_flags",
    "count",
    "counts_on_device",
    "layout",
    "localise",
    "pack",
    "place",
    "plan_from_fp8",
    "plan_to_fp8",
    "put",
    "puts_rows",
    "raise_flags",
    "rearrange",
    "reduce",
    "reduce_at",
    "route",
    "shares_memory",
    "spread",
    "unpermute",
    "unpermute_backward",
]
