"""Messages between nodes whose words are followed by rows (see `enclosed`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tokenyard.comm.base import Exchange
from tokenyard.transports.hierarchical.links import Links
from tokenyard.transports.hierarchical.staging import Staging
from tokenyard.wire.message import MESSAGE_WORDS
from tokenyard.wire.nodes_table import BEFORE, STATE, WITHDRAWN

WIDTH = BEFORE + MESSAGE_WORDS  # int64s for each rank


class Message(NamedTuple):
    """What a rank sends on a rail, by node: the bytes, how many each node gets, and how many of
    those are rows.
    """

    sent: Tensor
    counts: list[int]
    rows: list[int]


def swap(
    links: Links,
    staging: Staging,
    messages: Sequence[Message],
    turn: int,
    stage: str,
    meanwhile: Callable[[], object],
) -> None:
    """Send a message on each rail of this rank, and get those of the partners."""
    ends = []
    for rail, out, (sent, counts, rows) in zip(links.numbers, staging.received[turn], messages):
        exchange = Exchange(out, sent, staging.rooms, counts, stage, True, rows)
        ends.append(links.start(rail, exchange))
    try:
        meanwhile()
        for end in ends:
            end()
    except BaseException:
        _withdraw(messages[0], staging.sizes)
        raise


def _withdraw(message: Message, sizes: Sequence[int]) -> None:
    """Say in messages that still wait for their receivers that this rank has given up. Gloo reads a
    message when its receiver is there, so whoever comes later hears it. Nodes have `sizes` ranks.
    """
    sent, counts, _ = message
    for begin, count, size in zip(accumulate(counts, initial=0), counts, sizes):
        if count:
            words = sent.numpy()[begin : begin + 8 * WIDTH * size, 0].view(np.int64)
            words.reshape(size, WIDTH)[:, STATE] = WITHDRAWN
