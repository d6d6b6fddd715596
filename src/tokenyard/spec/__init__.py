"""The executable specification: what every result must be, bit for bit.

A function here sees all ranks at once, as lists, and uses plain loops, slow enough to be obviously
right. Tests compare every kernel set and transport with it. Only tests and `tokenyard.testing` may
import it; it is far too slow for anything else.

    exchange     layout, notify, dispatch, combine, and the gradients of the last two
    by_expert    dispatch whose rows arrive by local expert, and combine of such rows
    elastic      DeepEP V2's dispatch and combine, compact and expanded
    elastic_parts  V2's table, tensors between neighbours, and all-gathers
    logfmt       what is left of a row that combine sends as LogFMT
    low_latency  the mode with fixed slots and no counting round
    balanced     ranks of a node that compute for each other
    replicas     experts with several copies: which copy gets a token
    local        align, permute, rearrange and FP8: what happens to rows inside one rank
"""

from tokenyard.spec.balanced import Run, assign, balance, most_pairs, node_slots
from tokenyard.spec.by_expert import ReceivedByExpert, combine_by_expert, dispatch_by_expert
from tokenyard.spec.elastic import ElasticReceived, elastic_combine, elastic_dispatch
from tokenyard.spec.elastic_parts import agrs_gathered, engram_fetch, pp_received
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
from tokenyard.spec.logfmt import logfmt
from tokenyard.spec.low_latency import LowLatencyReceived, low_latency_combine, low_latency_dispatch
from tokenyard.spec.replicas import ReplicaWorld, choose, sum_replica_gradients, sum_replicas

__all__ = [
    "Aligned",
    "ElasticReceived",
    "LowLatencyReceived",
    "Notice",
    "Permuted",
    "ReceivedByExpert",
    "ReplicaWorld",
    "Run",
    "World",
    "agrs_gathered",
    "assign",
    "balance",
    "cast_back",
    "cast_to_fp8",
    "choose",
    "combine",
    "combine_backward",
    "combine_by_expert",
    "dispatch",
    "dispatch_backward",
    "dispatch_by_expert",
    "elastic_combine",
    "elastic_dispatch",
    "engram_fetch",
    "layout",
    "logfmt",
    "low_latency_combine",
    "low_latency_dispatch",
    "moe_align_block_size",
    "most_pairs",
    "node_slots",
    "notify",
    "pack_ue8m0",
    "permute",
    "pp_received",
    "rearrange",
    "sum_replica_gradients",
    "sum_replicas",
    "unpack_ue8m0",
    "unpermute",
    "unpermute_backward",
]
