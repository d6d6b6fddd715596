"""Blocks of an agreement by nodes.

A block is of int64s. It begins with whether all ranks of the sending node make one call with good
input, the width of the payload, and the call of its first rank; then come the facts of each of its
ranks. If all is well, the payload follows: how much each rank tells each rank of the other node as
the first number, and for each of those the sums over the sending node of the numbers after it.
Nodes that have fewer ranks than the largest leave the places of the others empty.
"""

from __future__ import annotations

from tokenyard.wire.message import CALL_WORDS, PAYLOAD_WORDS

AGREES, WIDTH, CALL = range(3)
RANKS = CALL + CALL_WORDS  # where the facts begin
FAILED, TOKENS, WORST, STAMP, LACKS, FACTS = range(6)  # the last: no memory for its rows

# From so many ranks on they agree by nodes: words for every rank, with which few rows may travel,
# are 1/4 MB of every rank by then. Below, that one round is faster: 64 processes in nodes of 8 took
# 165 ms for a dispatch and a combine of 8 tokens, and by nodes 600.
LEAST_RANKS = 256


def block_words(ranks: int, width: int = PAYLOAD_WORDS) -> int:
    """Words of a block between nodes of so many ranks.

    >>> 8 * block_words(8, width=9), 8 * block_words(8, width=0)
    (1488, 464)
    """
    return RANKS + FACTS * ranks + (ranks * (ranks + width - 1) if width else 0)


def most_messages(num_ranks: int, ranks: int) -> int:
    """With how many nodes a rank speaks at most.

    >>> most_messages(512, 8), most_messages(40, 8)
    (8, 1)
    """
    return -(-num_ranks // ranks**2) if num_ranks > ranks else 0
