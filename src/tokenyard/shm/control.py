"""The control segment: what a rank says to all ranks of its node, and where it gets their messages.

Each rank makes one, and all others map it. It holds, in this order:

    head     one line of int64s: FAILURE, LEFT, BEAT, DROPS
    signals  a line for each (kind of signal, rank that raises it)
    boxes    [2, R, box] int64: the messages of each rank, in turn (see `mailbox`)
    text     why this rank has given up
    drops    the identities of the last segments that this rank has given back
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np

from tokenyard.errors import TEXT_WORDS
from tokenyard.types import round_up
from tokenyard.wire.columns import LINE

FAILURE, LEFT, BEAT, DROPS = range(4)  # int64s of the head
# Signals: a message is there; rows were written; rows were read; rows lie where others may sum them
MAIL, ROWS, READ, STAGED = range(4)
KINDS = 4
NUM_DROPS = 64  # identities


class ControlLayout(NamedTuple):
    """Where things are in a control segment, in bytes."""

    size: int  # ranks of the node
    box: int  # int64s

    @property
    def boxes_at(self) -> int:
        return LINE * (1 + KINDS * self.size)

    @property
    def text_at(self) -> int:
        return self.boxes_at + 8 * 2 * self.size * self.box

    @property
    def drops_at(self) -> int:
        return self.text_at + 8 * TEXT_WORDS

    @property
    def num_bytes(self) -> int:
        return round_up(self.drops_at + 8 * NUM_DROPS, mmap.PAGESIZE)

    def signal(self, kind: int, rank: int) -> int:
        return LINE * (1 + kind * self.size + rank)

    def message(self, turn: int, rank: int) -> int:
        return self.boxes_at + 8 * self.box * (turn * self.size + rank)


class Control:
    """The control segment of one rank, as this process has mapped it."""

    def __init__(self, array: np.ndarray, layout: ControlLayout) -> None:
        self.address = int(array.ctypes.data)
        self.head = array[:LINE].view(np.int64)
        self.text = array[layout.text_at : layout.drops_at].view(np.int64)
        self.drops = array[layout.drops_at :][: 8 * NUM_DROPS].view(np.int64)
        boxes = array[layout.boxes_at : layout.text_at].view(np.int64)
        self.boxes = boxes.reshape(2, layout.size, layout.box)
