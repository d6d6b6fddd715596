"""What plans of all compiled calls have in common: checks of a shape, the words of a dispatch."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from tokenyard import validate
from tokenyard.topology import Placement
from tokenyard.types import Config
from tokenyard.wire import exchange_table as at
from tokenyard.wire import int64s

if TYPE_CHECKING:
    from tokenyard.engine.stages import Engine


def is_valid(engine: Engine, config: Config, tag: int) -> bool:
    try:
        engine.local.config(config)
        validate.tag(tag)
    except ValueError:
        return False
    return True


def find_placement(
    engine: Engine, num_experts: int, expert_alignment: int, config: Config, tag: int
) -> Placement | None:
    """Where the experts of a dispatch are; None if something of its shape is wrong."""
    try:
        placement = engine.local.placement(num_experts)
        validate.integer("expert_alignment", expert_alignment, at_least=1)
    except ValueError:
        return None
    return placement if is_valid(engine, config, tag) else None


def tell_shape(
    table: array[int], placement: Placement, rank: int, num_topk: int, expert_alignment: int
) -> tuple[np.ndarray, tuple[Placement, np.ndarray]]:
    """Write the words of a dispatch's shape, which tables have in the same places. Returns where
    the counts of this rank's experts will be, and what the words have addresses of.
    """
    per_expert = np.asarray(int64s.new(len(placement.experts_of_rank[rank])))
    padded = np.ascontiguousarray(placement.padded_experts_RL)
    table[at.NUM_TOPK], table[at.NUM_EXPERTS] = num_topk, placement.num_experts
    table[at.RANK_OF_EXPERT] = placement.rank_of_expert.data_ptr()
    table[at.OWN_EXPERTS] = placement.local_table(rank).data_ptr()
    table[at.PADDED_EXPERTS] = padded.ctypes.data
    table[at.MOST_EXPERTS] = placement.most_experts
    table[at.NUM_LOCAL], table[at.ALIGNMENT] = len(per_expert), expert_alignment
    table[at.PER_EXPERT] = per_expert.ctypes.data
    return per_expert, (placement, padded)
