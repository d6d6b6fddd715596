"""The kinds of signals between the ranks of a node. Their numbers place them in memory."""

from __future__ import annotations

MAIL = 0  # a message is there
ROWS = 1  # rows were written
READ = 2  # rows were read
STAGED = 3  # rows lie where others may sum them
KINDS = 4
