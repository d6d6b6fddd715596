"""What the compiled steps of a call between nodes are told: a table of int64, with a name for every
word.

`engine.compiled_nodes` fills the words of a Buffer and of a shape once, those of the staging when
it has grown, and before each call the few that differ from call to call. Addresses are of memory
that the caller keeps until the call is over. Letters are as in `types`; L ranks share this rank's
node, and P is 1 plus the most partners that a rank of it has.
"""

from __future__ import annotations

from tokenyard.wire.exchange_table import (
    ALIGNMENT,
    HEAD,
    MOST_EXPERTS,
    NUM_EXPERTS,
    NUM_LOCAL,
    NUM_TOPK,
    OWN_EXPERTS,
    PADDED_EXPERTS,
    PER_EXPERT,
    RANK_OF_EXPERT,
    ROW_BYTES,
)

# The Buffer.
RANK = 0  # this rank
SIZE = 1  # R
HOME = 2  # this rank's node
NUM_NODES = 3
NUM_RANKS = 4  # L
PLACE = 5  # of this rank in its node
NUM_PARTNERS = 6
RANKS = 7  # address of [R]: the ranks, by node
FIRSTS = 8  # address of [nodes + 1]: where each node's ranks begin there
WORDS = 9  # address of [nodes]: bytes of words in a message to each node
NUM_PLACES = 10  # P
SLOTS = 11  # address of [R]: where each rank's message is in what the node has heard
RELAYS = 12  # address of [rails of this rank, nodes]: the rank that sends to this one, or -1
NUM_RAILS = 13  # of this rank: the first is its own

# The shape of a call has the places that it has in the table of calls on one node: HEAD to
# PER_EXPERT.

RELAYED = 25  # address of [L, P, MESSAGE]: messages for the ranks of the node
SCRATCH = 26  # address of scratch_words(R, E) words that no call keeps anything in

# The staging, in the turn of a call.
STAGED = 27  # address of [L] addresses: where each local rank has staged its rows
PARCELS = 28  # address of [R] addresses: the parcel of each rank
PARTS = 29  # address of [partners] addresses: the words of each partner
RECEIVED = 30  # address of [nodes] addresses: what each node encloses on this rank's rail
OUTGOING = 31  # address of [rails] addresses: the messages of this rank
COUNTS = 32  # out, address of [rails, nodes]: bytes of each message
ROWS = 33  # out, the same: how many of them are rows
ENCLOSED = 34  # the most bytes that a message may enclose

# What differs from call to call.
NUMBER = 35  # of the call
NUM_TOKENS = 36  # T
WANTS = 37  # bytes that this rank would like to enclose
WANTS_STAGED = 38  # and to stage
X = 39  # address of the rows: [T, D] of a dispatch, [N, D] of a combine
TOPK_IDX = 40  # address of [T, K] int64
TOPK_WEIGHTS = 41  # address of [T, K] float32
MARKS = 42  # address of [T, R] bytes: which ranks get each token
TALLY = 43  # address of [3, R]: tokens, rows for this rank, and records for its node, by source
BITS = 44  # address of the marks of all ranks' tokens for this node, as parcels have them
HEARD = 45  # address of what the node has heard: [L, P, MESSAGE], as RELAYED
NUM_ROWS = 46  # N; out of a dispatch
OUT_X = 47  # address of [N, D] of a dispatch, of [T, D] of a combine
OUT_IDX = 48  # address of [N, K] int64
OUT_WEIGHTS = 49  # address of [N, K] float32
OUT_TOKENS = 50  # address of [N] int32: the token of each row
HANDLE = 51  # the number of the dispatch that a combine answers
TABLE_WORDS = 52

# The words before each message (see `transports.hierarchical.enclosed`), and how a rank came.
STATE, WANTS_ENCLOSED_AT, WANTS_STAGED_AT, BEFORE = range(4)
OFFERS, ENCLOSES, ALONE, WITHDRAWN = range(4)

HEADER = 8  # int64s before staged rows: the handle's call, columns, their widths, their begins

SMALL = 32 << 20  # bytes of a result for which a rank surely has memory

assert NUM_RAILS < HEAD <= PER_EXPERT < RELAYED

__all__ = [
    "ALIGNMENT",
    "HEAD",
    "MOST_EXPERTS",
    "NUM_EXPERTS",
    "NUM_LOCAL",
    "NUM_TOPK",
    "OWN_EXPERTS",
    "PADDED_EXPERTS",
    "PER_EXPERT",
    "RANK_OF_EXPERT",
    "ROW_BYTES",
]


def scratch_words(num_ranks: int, num_experts: int) -> int:
    """Words for the pairs of each expert, and for ranks by local ranks."""
    return num_experts + 1 + num_ranks * (num_ranks + 6)
