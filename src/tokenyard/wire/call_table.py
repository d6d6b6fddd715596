"""What a compiled low-latency call is told: a table of int64, with a name for every word.

A call takes the address of its table instead of two dozen numbers, since two numbers that change
places would be silent corruption. `new_table` fills the words that follow from a shape. The
caller adds those of its ranks and posts, once, and before each call the few that differ from call
to call. A call reads the words that it needs; the others stay 0.

Addresses are of memory that the caller keeps until the call has returned. Letters are as in
`wire.slots`: T tokens, K top-k, L local experts, R ranks, S slots of an expert, D hidden.
"""

from __future__ import annotations

from array import array

from tokenyard.wire import int64s
from tokenyard.wire.slots import SlotShape

# The ranks, and the words that they share.
RANK = 0  # this rank
SIZE = 1  # R
PATIENCE = 2  # pauses that a call waits for one rank
MASKED = 3  # address of [R]: not 0 for the ranks that this rank leaves out
FLAGS = 4  # address of [R] addresses: of each rank's word that says whether it leaves this one out
READS = 5  # address of [R] addresses: of each rank's word that says which call it has read
READ = 6  # address of this rank's word among those
POSTS = 7  # address of [R] addresses: of each rank's post, whose first word is its number
PEERS = 8  # address of [R, PEER_WORDS]: what this rank knows of each rank's post and memory
POST = 9  # address of this rank's post
HEAD = 10  # address of what this rank's next post says: all words before TEXT

# Sizes, which follow from a call's shape.
SIGNATURE = 11  # what all ranks' posts must have alike
NUM_MAX = 12  # tokens of a rank, at most
NUM_TOPK = 13  # K
NUM_EXPERTS = 14
NUM_LOCAL = 15  # L
NUM_SLOTS = 16  # S
HIDDEN = 17  # D
CAST = 18  # how rows are cast to FP8: a code of `wire.fp8`
ROW_BYTES = 19  # of a row that travels
SCALE_BYTES = 20  # of a row's scales, 0 without FP8
ROWS_AT = 21  # where rows begin in a block
SCALES_AT = 22  # where scales begin in a block
BLOCK_BYTES = 23
TABLE_BYTES = 24  # of what a combine tells one rank: where the rows of each expert begin
RANK_OF_EXPERT = 25  # address of [E] int32
LOCAL_OF_EXPERT = 26  # address of [E] int32: an expert's number on its own rank
OWN_EXPERTS = 27  # address of [E] int64: an expert's number on this rank, or -1

# What differs from call to call.
NUMBER = 28  # of this call
HANDLE = 29  # the number of the dispatch that a combine answers
NUM_TOKENS = 30  # T
TOPK_IDX = 31  # address of [T, K] int64
SENT = 32  # address of [2, T, K] int64: topk_idx, and each pair's place among those of its expert
BLOCK = 33  # address of the block that this rank sends
X = 34  # address of the rows: [T, D] that a dispatch sends, then [L, S, D] where it puts them
SCALES = 35  # address of [L, S, scales], 0 without FP8
COUNTS = 36  # address of [L] int32: rows of each local expert
SRC_INFO = 37  # address of [L, S] int32: each row's token on its source
LAYOUT_RANGE = 38  # address of [L, R] int64: begin << 32 | count of each source's rows
TOTALS = 39  # address of [L] int32 that counts are added to, or 0
Y = 40  # address of [L, S, D]: the rows that go back; 0 once they cannot be read any more
ROWS = 41  # address of the room to which rows that go back are copied; 0 if others read y itself
ROOM = 42  # rows that fit there
COPIES_OWN = 43  # 1 if this rank's rows for itself are copied, too
PICKED = 44  # address of [T, K] int64: each pair's place among those of its expert, or -1
WEIGHTS = 45  # address of [T, K] float32
OUT = 46  # address of [T, D]: the sums

# What is counted (`wire.counters`). 0: nothing.
WAITS = 47  # address of the waits of the ranks
COUNTERS = 48  # address of the counters of the stage
LOAD = 49  # address of [L]: rows of each local expert so far
BEGAN = 50  # when this half of a call began
BEGAN_FOR = 51  # the number of that call, 0 between its halves
YIELDS = 52  # turns of its core that a call gives away after PATIENCE, before it returns LATE
TABLE_WORDS = 53

# What a rank knows of another: words of PEERS. A segment is known by identity, address and size.
PEER_POST = 0  # address of the rank's post
PEER_BLOCK = 1  # the segment of its block: three words
PEER_ROWS = 4  # the segment of the rows of its combine: three words
PEER_WORDS = 7
SEGMENT_IDENTITY, SEGMENT_ADDRESS, SEGMENT_SIZE = 0, 1, 2  # the three words of a segment


def new_table(shape: SlotShape | None = None) -> array[int]:
    """A table of zeros but for the words that follow from a shape, if one is given."""
    table = int64s.new(TABLE_WORDS)
    if shape is not None:
        placement = shape.placement
        table[RANK] = shape.rank
        table[SIZE] = shape.num_ranks
        table[SIGNATURE] = shape.signature
        table[NUM_MAX] = shape.num_max
        table[NUM_TOPK] = shape.num_topk
        table[NUM_EXPERTS] = placement.num_experts
        table[NUM_LOCAL] = shape.num_local
        table[NUM_SLOTS] = shape.num_slots
        table[HIDDEN] = shape.hidden
        table[CAST] = shape.cast
        table[ROW_BYTES] = shape.row_bytes
        table[SCALE_BYTES] = shape.scale_bytes
        table[ROWS_AT] = shape.rows_at
        table[SCALES_AT] = shape.scales_at
        table[BLOCK_BYTES] = shape.block_bytes
        table[TABLE_BYTES] = shape.table_bytes
        table[RANK_OF_EXPERT] = placement.rank_of_expert.data_ptr()
        table[LOCAL_OF_EXPERT] = placement.local_of_expert.data_ptr()
        table[OWN_EXPERTS] = placement.local_table(shape.rank).data_ptr()
    return table
