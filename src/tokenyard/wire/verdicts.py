"""How a compiled call ended: what << 32 | which rank, place, count or kind of signal it is about.

After a verdict other than DONE a call may be made again.
"""

from __future__ import annotations

DONE = 0
LATE = 1  # signals of a kind have not come
GENERAL = 2  # the engine must make this call, or the rest of it
MAP = 3  # a rank's segment is not mapped yet, or some of its segments are gone
STRAY = 4  # a rank wrote what no rank writes
MORE_ROOM = 5  # there is no room to list so many rows
BAD = 6  # a pair that is no expert, or none that dispatch sent
TWICE = 7  # a pair that names its token's expert again
MASKED = 8  # a rank leaves this one out
POSTED = 9  # the message is sent; the call is entered again to receive
DIFFERS = 10  # a rank makes another call, or was given bad input
MORE_MEMORY = 11  # there is too little memory for what comes
MOVE = 12  # Python moves rows now
NO_MEMORY = 13  # a rank has no memory for its rows
SHORT = 14  # more rows come than a rank has said that there may be
LOW = (1 << 32) - 1  # the bits of `which`; and in a range of rows those of its count
