"""The kernels in plain torch: the simplest code that is right, on anything torch runs on.

Choose it to read what a kernel does, to step through it, or on devices that no other set knows.
"""

from tokenyard.kernels.reference.align import align
from tokenyard.kernels.reference.layout import layout, route
from tokenyard.kernels.reference.logfmt import logfmt
from tokenyard.kernels.reference.permute import place, spread, unpermute
from tokenyard.kernels.reference.permute_backward import unpermute_backward
from tokenyard.kernels.reference.quantize import plan_from_fp8, plan_to_fp8
from tokenyard.kernels.reference.rearrange import rearrange
from tokenyard.kernels.reference.reduce import reduce
from tokenyard.kernels.reference.rows import localise, pack

shares_memory = False
puts_rows = False
counts_on_device = False

__all__ = [
    "align",
    "layout",
    "localise",
    "logfmt",
    "pack",
    "place",
    "plan_from_fp8",
    "plan_to_fp8",
    "puts_rows",
    "rearrange",
    "reduce",
    "route",
    "shares_memory",
    "spread",
    "unpermute",
    "unpermute_backward",
]
