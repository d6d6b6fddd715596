"""What a compiled dispatch or combine is told: a table of int64, with a name for every word.

`engine.compiled` fills the words of a Buffer and of a shape once, and before each call the few that
differ from call to call. A call reads the words that it needs, writes those that say how far it has
come, and returns a verdict (`wire.verdicts`). After one other than DONE it may be made again, and
goes on where it was; or the engine goes on in its stead, since both write and read the same
messages and signals.

Addresses are of memory that the caller keeps until the call has returned. Letters are as in
`types`: T tokens, K top-k, E experts, R ranks, N rows.
"""

from __future__ import annotations

# The Buffer.
RANK = 0  # this rank
SIZE = 1  # R
PATIENCE = 2  # pauses that a call waits for a rank while it keeps its core
YIELDS = 3  # how often it gives the core away after that, before it returns LATE
EPOCHS = 4  # address of the epochs of each kind of signal
OUT_LINES = 5  # address of [kinds] addresses of [R] addresses: where this rank raises its signals
IN_LINES = 6  # the same: where it waits for the others'
OUT_BOXES = 7  # address of [2] addresses of [R] addresses: where its messages go, by turn
IN_BOXES = 8  # address of [2] addresses of [R, box] int64: the messages that come
BOX_BYTES = 9  # of one message that comes
DROPS = 10  # address of [R] addresses: how many segments each rank has given back
SEEN_DROPS = 11  # address of [R]: how many of those this rank has unmapped
KNOWN = 12  # address of [R, NUM_KNOWN, KNOWN_WORDS]: segments of others that are mapped
SCRATCH = 13  # address of SCRATCH_WORDS(R, E) words that no call keeps anything in

# The shape of a call.
HEAD = 14  # address of the message up to its payload
NUM_TOPK = 15  # K
NUM_EXPERTS = 16  # E
ROW_BYTES = 17
RANK_OF_EXPERT = 18  # address of [E] int32
OWN_EXPERTS = 19  # address of [E] int64: an expert's number on this rank, or -1
PADDED_EXPERTS = 20  # address of [R, MOST_EXPERTS] int64: the experts of each rank, then E
MOST_EXPERTS = 21  # of one rank
NUM_LOCAL = 22  # experts of this rank
ALIGNMENT = 23  # of the counts of a dispatch
PER_EXPERT = 24  # address of [NUM_LOCAL]: what a dispatch counts

# What differs from call to call.
PHASE = 25  # how far the call has come
LEAVE_AT = 26  # a phase at which the engine takes over: for tests. 0: none
NUMBER = 27  # of the call
NUM_TOKENS = 28  # T
X = 29  # address of the rows: [T, D] of a dispatch, [N, D] of a combine
TOPK_IDX = 30  # address of [T, K] int64
TOPK_WEIGHTS = 31  # address of [T, K] float32
BLOCK = 32  # address of the memory offered: where rows arrive, or are copied for others to read
LEDGER = 33  # address of the memory of `engine.ledger.WrittenLedger`
ROOM = 34  # rows that the ledger has room for: T * min(K, R)
SRC_ROOM = 35  # rows that arrive, for which it has room
STARTS = 36  # address of [T + 1] int32 in it: Route.copy_start
COPY_RANKS = 37  # address of [ROOM] int32: Route.copy_rank
COPY_SLOTS = 38  # the same: Route.copy_slot
SRC_IDX = 39  # address of [SRC_ROOM] int32: the token of each row that arrives
NUM_ROWS = 40  # out: rows that arrive
END = 41  # out: bytes that they take of the block; M of rows by expert
NUM_COPIES = 42  # out: rows that are sent
OUT = 43  # address of [T, D]: the sums
HANDLE = 44  # the number of the dispatch that a combine answers
COPIES = 45  # 1 if the rows of a combine are copied to the block; 0 if others read them at X
# What is counted (`wire.counters`). 0: nothing.
WAITS = 46  # address of the waits of the ranks
COUNTERS = 47  # address of the counters of the stage
LOAD = 48  # address of [NUM_LOCAL]: pairs of each expert so far
BEGAN = 49  # when the call began

# Rows by expert. M: rows with their padding.
ROW_OF = 50  # address of [SRC_ROOM, K] int64: the row of each pair that arrives, -1 of no own one
FACTORS = 51  # address of [SRC_ROOM, K] float32: their weights, 0 there
ENDS = 52  # address of [NUM_LOCAL] int32: where each expert's rows end
RESULT = 53  # address of the rows of a dispatch
RESULT_BYTES = 54  # for which there is room
TERMS = 55  # address of 2 K words that no call keeps anything in
Y = 56  # address of [M, D], of which a combine sums its shares to BLOCK. 0: they are X already
WEIGH = 57  # whether each row counts as often as its weight says
SCALES = 58  # address of [T, S], which go with the rows of FP8
SCALE_BYTES = 59  # of a row of them; 0: there are none
RESULT_SCALES = 60  # address of the scales of the rows of a dispatch
MUCH_FROM = 61  # bytes of all ranks' pairs from which they do not travel in parcels
FIRST = 62  # 1 if BLOCK is told for the first time: then a dispatch waits until it was read
TABLE_WORDS = 63

# Phases. A call of a phase has done all that comes before it.
START = 0
POSTED = 1  # the message is sent: from here on the others rely on this rank
HEARD = 2  # all messages have come
SENT = 3  # rows are where others read them, and signalled
ARRIVED = 4  # all rows of others are there
SUMMED = 5  # the sums are made, and signalled
OVER = 6

NUM_KNOWN = 8  # segments of one rank
KNOWN_WORDS = 3  # identity, address, size


def scratch_words(num_ranks: int, num_experts: int) -> int:
    """[E + 1] pairs of each expert, and six words for each rank."""
    return num_experts + 1 + 6 * num_ranks
