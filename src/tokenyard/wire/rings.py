"""How a call uses rings: the transport settles it, and its kernels follow."""

from __future__ import annotations

from typing import NamedTuple


class RingUse(NamedTuple):
    """How a call uses rings, equal on all ranks: both ends of a ring count slots and channels."""

    slots: int  # rows that a ring holds
    chunk: int  # rows that move before the next ring has its turn
    num_channels: int  # the first of a Buffer's channels, which share the tokens of this call
