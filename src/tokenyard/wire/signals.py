"""The kinds of signals between the ranks of a node. Their numbers place them in memory."""

from __future__ import annotations

MAIL = 0  # a message is there
ROWS = 1  # rows were written
READ = 2  # rows were read
KINDS = 3
