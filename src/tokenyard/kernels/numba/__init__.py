"""The kernels compiled by Numba: the fast path on CPU.

Kernels release the GIL and are compiled once, into a cache on disk. `NUMBA_DISABLE_JIT=1` does not
apply to them, since they read raw addresses: to step through a kernel, take the reference set.

    layout       who gets each token, and the lists of rows
    rows         pack, scatter and localise: moving bytes, renaming experts
    reduce       the sum of combine
    align        pairs by expert, in whole blocks
    permute      rows by local expert, and back; permute_backward its gradients
    rearrange/   copies between any two strides
    quantize     to FP8 and back
    logfmt       what LogFMT leaves of rows
    call/        a whole dispatch or combine of ranks that share memory
    between_nodes/  the steps of a call of few rows between nodes
    signals      signals between ranks that share memory
    ring/        rows through a fixed amount of shared memory: the protocol and its two uses
    llvm/        what Numba has no word for
    caching      compiled code on disk
"""

from tokenyard.kernels.numba.align import align
from tokenyard.kernels.numba.between_nodes.combine import nodes_combine, nodes_sums
from tokenyard.kernels.numba.between_nodes.dispatch import nodes_dispatch, nodes_rows
from tokenyard.kernels.numba.call.ahead import expect_calls
from tokenyard.kernels.numba.call.balance import assign, balance_call, count_pairs, take_slots
from tokenyard.kernels.numba.call.by_expert import call_by_expert, take_rows
from tokenyard.kernels.numba.call.by_source import call_by_source, write_rows
from tokenyard.kernels.numba.call.slot_sums import combine_slots
from tokenyard.kernels.numba.call.slots import dispatch_slots
from tokenyard.kernels.numba.call.sums import call_combine, share_rows, sum_rows
from tokenyard.kernels.numba.layout import layout, list_by_lane, route
from tokenyard.kernels.numba.logfmt import logfmt
from tokenyard.kernels.numba.permute import (
    place,
    spread,
    unpermute,
)
from tokenyard.kernels.numba.permute_backward import unpermute_backward
from tokenyard.kernels.numba.quantize import plan_from_fp8, plan_to_fp8
from tokenyard.kernels.numba.rearrange.boxes import rearrange
from tokenyard.kernels.numba.reduce import reduce, reduce_at
from tokenyard.kernels.numba.ring.combine import plan_ring_combine, ring_combine
from tokenyard.kernels.numba.ring.dispatch import plan_ring_dispatch, ring_dispatch
from tokenyard.kernels.numba.ring.protocol import make_rings, ring_bytes, ring_slots
from tokenyard.kernels.numba.rows import (
    localise,
    pack,
    scatter,
)
from tokenyard.kernels.numba.signals import await_signals, meet, post

shares_memory = True
puts_rows = False
counts_on_device = False

__all__ = [
    "align",
    "assign",
    "await_signals",
    "balance_call",
    "call_by_expert",
    "call_by_source",
    "call_combine",
    "combine_slots",
    "count_pairs",
    "counts_on_device",
    "dispatch_slots",
    "expect_calls",
    "layout",
    "list_by_lane",
    "localise",
    "logfmt",
    "make_rings",
    "meet",
    "nodes_combine",
    "nodes_dispatch",
    "nodes_rows",
    "nodes_sums",
    "pack",
    "place",
    "plan_from_fp8",
    "plan_ring_combine",
    "plan_ring_dispatch",
    "plan_to_fp8",
    "post",
    "puts_rows",
    "rearrange",
    "reduce",
    "reduce_at",
    "ring_bytes",
    "ring_combine",
    "ring_dispatch",
    "ring_slots",
    "route",
    "scatter",
    "share_rows",
    "shares_memory",
    "spread",
    "sum_rows",
    "take_rows",
    "take_slots",
    "unpermute",
    "unpermute_backward",
    "write_rows",
]
