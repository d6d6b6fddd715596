"""The kernels in plain torch: the simplest code that is right, on anything torch runs on.

Choose it to read what a kernel does, to step through it, or on devices that no other set knows.
"""

from tokenyard.kernels.reference.exchange import (
    channel_prefix,
    layout,
    localise,
    pack,
    reduce,
    route,
)
from tokenyard.kernels.reference.quantize import plan_from_fp8, plan_to_fp8

__all__ = [
    "channel_prefix",
    "layout",
    "localise",
    "pack",
    "plan_from_fp8",
    "plan_to_fp8",
    "reduce",
    "route",
]
