"""What a compiled call is told: a table of int64, with a name for every word.

`engine.plans` fills the words of a Buffer and of a shape once, and before each call the few that
differ from call to call. A call reads the words that it needs, writes those that say how far it has
come, and returns a verdict (`wire.verdicts`). After one other than DONE it may be made again, and
goes on where it was: so Python can give it memory, or move many rows in threads, in the middle.

Addresses are of memory that the caller keeps until the call has returned. Letters are as in
`types`: T tokens, K top-k, E experts, R ranks, N rows of tokens, and M rows of pairs with their
padding. C is MOST_COLUMNS.
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
WAITS = 13  # address of the waits of the ranks (`wire.counters`). 0: nothing is counted
NODES = 14  # address of [R] int32: the node of each rank. 0: there is one

# The shape of a call.
HEAD = 15  # address of the message up to its payload
COUNTERS = 16  # address of the counters of the stage (`wire.counters`). 0: nothing is counted
NUM_TOPK = 17  # K
NUM_EXPERTS = 18  # E
RANK_OF_EXPERT = 19  # address of [E] int32
OWN_EXPERTS = 20  # address of [E] int64: an expert's number on this rank, or -1
PADDED_EXPERTS = 21  # address of [R, MOST_EXPERTS] int64: the experts of each rank, then E
MOST_EXPERTS = 22  # of one rank
NUM_LOCAL = 23  # experts of this rank
ALIGNMENT = 24  # of the rows of each expert, or of their counts
PER_EXPERT = 25  # address of [NUM_LOCAL]: out, the rows of each expert
LOAD = 26  # address of [NUM_LOCAL]: pairs of each expert so far
IDS = 27  # the column of ids, which that of weights follows; -1: there are none
NUM_COLUMNS = 28
WIDTHS = 29  # [C] bytes of a row of each column

# Memory in which nothing is kept from call to call.
PAIRS = 34  # address of [E + 1]: pairs of each expert
TAKEN = 35  # address of [R]: tokens that go to each rank
TOLD = 36  # address of [R, TOLD_WORDS]: what each rank is told of counts
HEARD = 37  # the same: what each rank has told
TOLD_WORDS = 38
LACKS = 39  # address of [R]: 1 if a rank has told of too little memory
PLACES = 40  # address of [C, R]: where this rank's rows of each column lie in each rank's memory
TERMS = 41  # address of terms_words(R, K) words for the terms of a sum

# What differs from call to call.
PHASE = 42  # how far the call has come
HANDS_OVER = 43  # 1: Python moves the rows, when the call returns MOVE
NUMBER = 44  # of the call
HANDLE = 45  # the number of the dispatch that a combine or cached dispatch goes along
PART = 46  # how many parts of the message have been sent
NUM_TOKENS = 47  # T
MARKS = 48  # address of [T, R] bool: who gets each token. 0: the ids say so
WORST = 49  # as many rows as there must be. 0: as many as come
SOURCES = 50  # [C] addresses of the columns
BLOCK = 55  # address of the memory offered: where rows arrive, or lie for others to read
AWAITS = 56  # 1: the call ends when all have read the block
LEDGER = 57  # address of the memory of `engine.ledger.WrittenLedger`
ROOM = 58  # rows that the ledger has room for: those that are sent
SRC_ROOM = 59  # and those that arrive
NUM_ROWS = 60  # out: N, rows that arrive, or as many as there must be
END = 61  # out: bytes that they take of the block; by expert M
NUM_COPIES = 62  # out: rows that are sent
BEGAN = 63  # when the call began

# Rows by expert.
ROW_OF = 64  # address of [SRC_ROOM, K] int64: the row of each pair that arrives, -1 of no own one
FACTORS = 65  # address of [SRC_ROOM, K] float32: their weights, 0 there
ENDS = 66  # address of [NUM_LOCAL] int32: where each expert's rows end
RESULT = 67  # address of the rows of a dispatch
RESULT_SCALES = 68  # address of their scales

# A combine of columns [N, D], or by expert [M, D].
OUTS = 69  # [2] addresses of [T, D]: the sums of each column
BIASES = 71  # [2] addresses of [T, D]
NUM_BIASES = 73
BY_EXPERT = 74  # 1: each rank sums its rows of a token first
WEIGH = 75  # whether each of those counts as often as its weight says
ALL_READY = 76  # whether every rank's rows could be read when it posted
BEGINS = 77  # [2] where each column is copied to in the block; -1: others read it where it is

# Ranks that go on without others. 0 where none may.
MASKED = 79  # address of [R]: not 0 for the ranks that this rank leaves out
FLAGS = 80  # address of [R] addresses: of each rank's word that says whether it leaves this one out

# Rows in slots: S of each expert, R times the most tokens of a rank.
LATER = 81  # 1: the call returns POSTED once its message is sent, and is entered again to receive
CAST = 82  # how rows are cast to FP8: a code of `wire.fp8`
NUM_SLOTS = 83  # S
PAIRS_SENT = 84  # address of [2, T, K]: topk_idx of the dispatch, each pair's place of its expert
RANGES = 85  # address of [NUM_LOCAL, R]: begin << 32 | count of each rank's rows
SRC_INFO = 86  # address of [NUM_LOCAL, S] int32: each row's token on its rank
TOTALS = 87  # address of [NUM_LOCAL] int32 that counts are added to, or 0
LOCAL_OF_EXPERT = 88  # address of [E] int32: an expert's number on its own rank
ROWS_AT = 89  # address of the room for rows that others read. 0: they lie there already
FIRSTS_BYTES = 90  # of what a combine tells one rank: where the rows of each expert begin
TABLE_WORDS = 91

MOST_COLUMNS = 5  # x, scales, ids, weights, tokens
MOST_SUMS = 2  # columns of a combine, and biases

# Phases. A call of a phase has done all that comes before it.
START = 0
POSTED = 1  # the message is sent: from here on the others rely on this rank
MET = 2  # all messages have come
ASKED = 3  # where some rank has too little memory: it is asked to take more
OFFERED = 4  # ... which all tell of
MET_AGAIN = 5  # ... and have heard
PLACED = 6  # it is known where rows go
MOVED = 7  # they are there
SENT = 8  # and that is signalled
ARRIVED = 9  # all rows of others are where they shall be
SUMMED = 10  # the sums are made
READ = 11  # that others' rows were read is signalled
OVER = 12

NUM_KNOWN = 8  # segments of one rank
KNOWN_WORDS = 3  # identity, address, size


def terms_words(num_ranks: int, num_topk: int) -> int:
    """Addresses, factors and ends of the most terms that a sum can have, or lists of columns."""
    return 3 * (MOST_COLUMNS + 1 + MOST_SUMS + num_ranks + num_topk)
