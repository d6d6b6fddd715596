"""Prepared: an exchange that `Buffer.prepare` has prepared once, for loops of few tokens.

step = buffer.prepare(max_tokens=64, hidden=2048, num_topk=8, num_experts=64)
rows = step.dispatch(x, topk_idx, topk_weights)
out = step.combine(experts(rows.x, rows.offsets))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenyard import recording
from tokenyard.engine.calls import SharedCalls
from tokenyard.engine.prepared import OrdinaryPair, Pair, PreparedRows, Shape
from tokenyard.engine.standing import StandingPair

if TYPE_CHECKING:
    from tokenyard.engine.engine import Engine
    from tokenyard.lifetime import Lifetime


class Prepared:
    """Dispatches and combines of one shape, in memory that is taken once.

    What a dispatch brings is good until the next dispatch but one; what combine returns is the
    caller's. All ranks make the same calls in the same order, among the other calls of the Buffer,
    with any number of tokens up to `max_tokens`, also none. A call keeps the Buffer's promises: the
    same bits each time, all ranks go on or all raise, a rank that died is named.
    """

    def __init__(self, buffer: Lifetime, engine: Engine, shape: Shape) -> None:
        self._buffer = buffer  # which lives as long as somebody may call it here
        self._use, self._shape = buffer._use, shape
        self._dispatch_stage, self._combine_stage = shape.stages
        self._pair = self._find_pair(engine)

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> PreparedRows:
        """Send every token to its experts: [T, hidden], and [T, K] int64 and float32."""
        self._use.stage = self._dispatch_stage
        with self._use as engine:
            if engine.local.given_placement is not self._placement:  # after a rebalance
                self._pair = self._find_pair(engine)
            rows = self._pair.dispatch(x, topk_idx, topk_weights)
        if (notes := recording.active) is not None:
            notes.note(engine, x, topk_idx, topk_weights, self._shape.num_experts)
        return rows

    def combine(self, y: Tensor, *, weigh: bool = True, out: Tensor | None = None) -> Tensor:
        """[T, hidden]: each token's sum of its rows of y, which are those of the last dispatch.

        By expert rows are weighed as that dispatch was told, unless `weigh` is False; by source
        they are summed as they are. With `out` the sums are written there.
        """
        self._use.stage = self._combine_stage
        with self._use:
            return self._pair.combine(y, weigh, out)

    def _find_pair(self, engine: Engine) -> Pair:
        with torch.inference_mode(False):  # its memory may be used outside of it
            return self._pair_of(engine)

    def _pair_of(self, engine: Engine) -> Pair:
        self._placement = engine.local.given_placement
        if isinstance(engine.calls, SharedCalls):
            return StandingPair(engine, engine.calls, self._shape)
        return OrdinaryPair(engine, self._shape)
