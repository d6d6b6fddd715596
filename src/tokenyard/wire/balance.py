"""What stands beside the table of a balance, and what it finds: int64s."""

from __future__ import annotations

MILLION = 1_000_000

# Numbers, and addresses.
SLACK = 0  # in millionths
IDS, NUM_PAIRS, OUT = 1, 2, 3  # of this rank's pairs: their experts, and the slots that they get
OWNERS, NODES, SLOTS = (
    4,
    5,
    6,
)  # the rank of each expert; the node of each rank; slots[rank, expert]
RUNS, FIRST, FIGURES = 7, 8, 9  # what `assign` finds
NUM_WORDS = 10

# Figures of this rank's node, and of this rank: pairs of all its ranks; the most that a rank would
# have without balance, and has; the pairs that this rank borrows, and of how many experts. Then
# there are, for each rank, the pairs that are borrowed from it.
TOTAL, BEFORE, AFTER, BORROWED, EXPERTS, NUM_FIGURES = range(6)
