"""A placement that changes: all ranks agree on the new one, and forget what the old one told them.

Only what the Buffer knows changes here. The holder of the weights moves them by the Moves that
come back, as `nn.rebalance` does.
"""

from __future__ import annotations

from typing import Any

from tokenyard import validate
from tokenyard.engine.agreement import Call, Terms
from tokenyard.engine.engine import Engine
from tokenyard.engine.mismatch import STAGES
from tokenyard.replicas import Moves, as_replicas, num_logical, place_words
from tokenyard.topology import Placement
from tokenyard.types import digest

_STAGE = "rebalance"


def rebalance(engine: Engine, placement: Any) -> Moves:
    """From the next call on experts live where `placement` says. Handles made before are refused.

    Raises on all ranks, and changes nothing, if the placement is bad or ranks give different ones.
    """
    engine.worker.drain()
    try:
        placed = validate.placement(placement, engine.num_ranks, engine.device)
        before = engine.local.given_placement
        if before is None:  # even: any number of experts, so as many as there will be
            before = Placement.even(num_logical(placed), engine.num_ranks)
        moves = as_replicas(before).moves(as_replicas(placed), engine.topology.node_of_rank)
        mark = digest(repr(place_words(placed)))
        terms = Terms(Call(stage=STAGES.index(_STAGE), options=mark))
    except Exception as error:
        engine.agreement.reject(_STAGE, error)
    engine.agreement.meet(_STAGE, terms)
    engine.place(placed, mark)
    return moves
