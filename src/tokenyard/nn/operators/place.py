"""Weights must lie where the Buffer sends their rows."""

from __future__ import annotations

from tokenyard.buffer import Buffer

NO_PLACE = -1  # of a caller that looks after its weights itself


def check_place(buffer: Buffer, num_experts: int, place: int) -> None:
    """Raise on all ranks if the Buffer's placement is not the one with this mark.

    An operator asks, so compiled graphs do too. Ranks that find nothing wrong are in a dispatch by
    then, where `refuse` meets them.
    """
    if place == NO_PLACE:
        return
    try:
        now = buffer.get_placement(num_experts).mark
    except ValueError:  # of another number of experts
        now = NO_PLACE
    if place != now:
        buffer.refuse(
            ValueError(
                "the Buffer was rebalanced, and the experts of this module still lie where they "
                "were: want tokenyard.nn.rebalance(module, placement) with every module that uses "
                f"the Buffer, copies of a model too, on rank {buffer.rank}"
            )
        )
