"""What the compiled steps of a call between nodes are told: a table of int64, with a name for every
word.

Both ways of a call fill it: `engine.nodes`, and the engine's through
`transports.hierarchical.enclosed`. The words of a Buffer and of a shape are written once, those of
the staging when it has grown, and before each call the few that differ from call to call. Addresses
are of memory that the caller keeps until the call is over. Letters are as in `types`; L ranks share
this rank's node, and P is 1 plus the most partners that a rank of it has.
"""

from __future__ import annotations

from tokenyard.wire.call import (
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
)
from tokenyard.wire.message import MESSAGE_WORDS

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

RELAYED = 27  # address of [L, P, WIDTH]: messages for the ranks of the node
TOLD = 28  # address of [R, WIDTH]: what this rank tells each rank

# The staging, in the turn of a call.
STAGED = 29  # address of [L] addresses: where each local rank has staged its rows
PARCELS = 30  # address of [R] addresses: the parcel of each rank
PARTS = 31  # address of [partners] addresses: the words of each partner
RECEIVED = 32  # address of [nodes] addresses: what each node encloses on this rank's rail
OUTGOING = 33  # address of [rails] addresses: the messages of this rank
COUNTS = 34  # out, address of [rails, nodes]: bytes of each message
ROWS = 35  # out, the same: how many of them are rows
ENCLOSED = 36  # the most bytes that a message may enclose
MOST_STAGED = 37  # and that a rank may stage

# What differs from call to call.
SCRATCH = 38  # address of scratch_words(R, L, E) words that no call keeps anything in
COMES = 39  # how this rank comes: the STATE below
WANTS = 40  # bytes that this rank would like to enclose
WANTS_STAGED = 41  # and to stage
IS_BACK = 42  # whether this is a combine
NUM_TOKENS = 43  # T
MARKS = 44  # address of [T, R] bytes: which ranks get each token
TALLY = 45  # address of [FACTS + L, R]: what is known of each source, in the rows below
BITS = 46  # address of the marks of sources' tokens for this node, as parcels have them
HEARD = 47  # address of what the node has heard: [L, P, WIDTH], as RELAYED
NUM_ROWS = 48  # N; out of a compiled dispatch
HANDLE = 49  # the number of the dispatch that a combine answers
BIASES = 50  # address of [NUM_BIASES] addresses of [T, D]
NUM_BIASES = 51
NUM_COLUMNS = 52
SOURCES = 53  # the address of each column: [T, D] of a dispatch, [N, D] of a combine
STRIDES = 58  # from row to row there
WIDTHS = 63  # bytes of a row
TARGETS = 68  # the address of its results: [N, D] of a dispatch, [T, D] of a combine
TABLE_WORDS = 73
MOST_COLUMNS = STRIDES - SOURCES

# What a rank knows of each source once a dispatch is over: its tokens, its rows for this rank, its
# records for this node, and where its marks are in BITS; then, for each local rank, where its rows
# begin in that rank's result. What only relays need is known of this rank and its partners alone,
# where rows did not come with the words of the agreement.
CAME_TOKENS, CAME_ROWS, CAME_RECORDS, CAME_BITS, FACTS = range(5)

# The words before each message (see `transports.hierarchical.enclosed`), and how a rank came.
STATE, WANTS_ENCLOSED_AT, WANTS_STAGED_AT, BEFORE = range(4)
WIDTH = BEFORE + MESSAGE_WORDS  # int64s for each rank
OFFERS, ENCLOSES, ALONE, WITHDRAWN = range(4)

# Int64s before staged rows: the handle's call, columns, their widths, their begins.
HEADER, HEADER_WIDTHS, HEADER_BEGINS = 8, 2, 4

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
]


def scratch_words(num_ranks: int, num_local: int, num_experts: int) -> int:
    """Words for the pairs of each expert and the tokens of each rank, or for where the columns of
    local ranks' rows begin.
    """
    return num_experts + 1 + num_ranks + 2 * num_local
