"""What everything means: the executable specification.

All ranks at once, as lists, in plain loops that are slow enough to be obviously right. Kernels and
transports are compared with it bit for bit; nothing but tests and `tokenyard.testing` imports it.

    exchange     layout, notify, dispatch, combine, and the gradients of the last two
    low_latency  the mode with fixed slots and no counting round
    local        align, permute, rearrange and FP8: what happens to rows inside one rank
"""

from tokenyard.spec.exchange import (
    Notice,
    World,
    combine,
    combine_backward,
    dispatch,
    dispatch_backward,
    layout,
    notify,
)
from tokenyard.spec.local import (
    Aligned,
    Permuted,
    cast_back,
    cast_to_fp8,
    moe_align_block_size,
    pack_ue8m0,
    permute,
    rearrange,
    unpack_ue8m0,
    unpermute,
    unpermute_backward,
)
from tokenyard.spec.low_latency import LowLatencyReceived, low_latency_combine, low_latency_dispatch

__all__ = [
    "Aligned",
    "LowLatencyReceived",
    "Notice",
    "Permuted",
    "World",
    "cast_back",
    "cast_to_fp8",
    "combine",
    "combine_backward",
    "dispatch",
    "dispatch_backward",
    "layout",
    "low_latency_combine",
    "low_latency_dispatch",
    "moe_align_block_size",
    "notify",
    "pack_ue8m0",
    "permute",
    "rearrange",
    "unpack_ue8m0",
    "unpermute",
    "unpermute_backward",
]
