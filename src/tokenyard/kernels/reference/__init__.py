"""The kernels in plain torch: the simplest code that is right, on anything torch runs on.

Choose it to read what a kernel does, to step through it, or on devices that no other set knows.
"""

from tokenyard.kernels.reference.exchange import (
    layout,
    localise,
    pack,
    reduce,
    route,
)

__all__ = ["layout", "localise", "pack", "reduce", "route"]
