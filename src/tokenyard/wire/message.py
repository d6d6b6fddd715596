"""Where things stand in the message with which ranks agree on a call: int64s, always as many.

A message holds: whether its sender has failed, the call, two sizes of the sender, when it came, the
offer of its transport, and as much of the payload as fits. All messages have one length: a length
that followed from the input could be wrong on one rank. A sender may leave out the words that no
rank reads: those after the offer and the payload of the call that the message names.
"""

from __future__ import annotations

FAILED = 0
CALL = 1  # the words of a `Call`
CALL_WORDS = 16
NUMBER = CALL + 2  # of the call, which is one of those words
HANDLE = CALL + 3  # likewise
TOKENS = CALL + CALL_WORDS  # words before this one must be the same on all ranks
WORST = TOKENS + 1  # num_worst_tokens
STAMP = TOKENS + 2  # when the sender came, by its own clock in nanoseconds; 0: not told
OFFER = TOKENS + 3
OFFER_WORDS = 12
PAYLOAD = OFFER + OFFER_WORDS
MESSAGE_WORDS = 128
PAYLOAD_WORDS = MESSAGE_WORDS - PAYLOAD

# An offer of rows in memory that ranks share: how they may be read, and for each column what names
# the segment (`Segment.told`) and where the rows begin there.
HOW = OFFER
SEGMENTS = OFFER + 1
SEGMENT_FD, SEGMENT_SIZE, SEGMENT_IDENTITY, SEGMENT_BEGIN, SEGMENT_WORDS = range(5)
READY, LATER = 1, 2  # bits: rows can be read now; the sender reads those of others later

# What a dispatch has room for beside that: how many rows it can list, and by expert how many rows
# with their padding.
LISTS, ROOM = SEGMENTS + 2 * SEGMENT_WORDS, SEGMENTS + 2 * SEGMENT_WORDS + 1

NO_MEMORY = -1  # offered instead of a file descriptor, or of room
