"""Exchanges that are prepared once, for loops of few tokens: `Prepared` by a user, with
`Buffer.prepare`, and `Few` by the layers of a Buffer, without a word.

step = buffer.prepare(max_tokens=64, hidden=2048, num_topk=8, num_experts=64)
rows = step.dispatch(x, topk_idx, topk_weights)
out = step.combine(experts(rows.x, rows.offsets))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tokenyard.engine.calls import SharedCalls
from tokenyard.engine.inputs import CombineRequest
from tokenyard.engine.prepared import OrdinaryPair, Pair, PreparedRows, Shape, checked_shape
from tokenyard.engine.standing import StandingPair
from tokenyard.runtime import observers
from tokenyard.runtime.copies import Once
from tokenyard.runtime.threads import num_threads
from tokenyard.types import Config

if TYPE_CHECKING:
    from tokenyard.engine.engine import Engine

_FEW = 128  # tokens
_MOST_SHAPES = 32


class Use(Protocol):
    """The context of a Buffer's call, see `lifetime`."""

    stage: str

    def __enter__(self) -> Engine: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class Prepared(Once):
    """Dispatches and combines of one shape, in memory that is taken once.

    What a dispatch brings is good until the next dispatch but one; what combine returns is the
    caller's. All ranks make the same calls in the same order, among the other calls of the Buffer,
    with any number of tokens up to `max_tokens`, also none. A call keeps the Buffer's promises: the
    same bits each time, all ranks go on or all raise, a rank that died is named.
    """

    def __init__(self, buffer: object, use: Use, engine: Engine, shape: Shape) -> None:
        self._buffer = buffer  # which lives as long as somebody may call it here
        self._use, self._shape = use, shape
        self._dispatch_stage, self._combine_stage = shape.stages
        self._pair = self._find_pair(engine)

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> PreparedRows:
        """Send every token to its experts: [T, hidden], and [T, K] int64 and float32."""
        self._use.stage = self._dispatch_stage
        with self._use as engine:
            if engine.local.given_placement is not self._placement:  # after a rebalance
                try:
                    self._pair = self._find_pair(engine)
                except Exception as error:
                    engine.reject(self._dispatch_stage, error)
            rows = self._pair.dispatch(x, topk_idx, topk_weights)
        for tell in observers.dispatched:
            tell(engine, x, topk_idx, topk_weights, self._shape.num_experts)
        return rows

    def combine(self, y: Tensor, *, weigh: bool = True, out: Tensor | None = None) -> Tensor:
        """[T, hidden]: each token's sum of its rows of y, which are those of the last dispatch.

        By expert rows are weighed as that dispatch was told, unless `weigh` is False; by source
        they are summed as they are. With `out` the sums are written there.
        """
        self._use.stage = self._combine_stage
        with self._use:
            return self._pair.combine(y, weigh, out)

    def forget(self) -> None:
        """The Buffer closes."""
        del self._pair

    def _find_pair(self, engine: Engine) -> Pair:
        with torch.inference_mode(False):  # its memory may be used outside of it
            return self._pair_of(engine)

    def _pair_of(self, engine: Engine) -> Pair:
        if isinstance(engine.calls, SharedCalls):
            pair: Pair = StandingPair(engine, engine.calls, self._shape)
        else:
            pair = OrdinaryPair(engine, self._shape)
        self._placement = engine.local.given_placement
        return pair


class Few:
    """The exchanges by expert that layers of a Buffer prepare by themselves, where they have few
    tokens and the Buffer's calls are compiled. Rows that somebody still holds when their memory's
    turn comes stay as they are. To other ranks it is all the same.
    """

    def __init__(self, use: Use, config: Config, has_balance: bool) -> None:
        self._use, self._config, self._has_balance = use, config, has_balance
        self._idle: dict[Shape, list[StandingPair]] = {}

    def forget(self) -> None:
        """Experts have moved, or the Buffer closes."""
        self._idle = {}

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        tag: int,
        balanced: bool,
    ) -> Step | None:
        """What dispatch_by_expert does; None if that is as quick, or if no such shape can be
        prepared.
        """
        if x.dim() != 2 or topk_idx.dim() != 2 or (self._has_balance and not balanced):
            return None  # what is prepared is balanced
        (num_tokens, hidden), num_topk = x.shape, topk_idx.shape[1]
        shape = Shape(
            _FEW, hidden, num_topk, num_experts, x.dtype, True, 1, self._config, tag, True
        )
        if (
            num_tokens > _FEW
            or num_threads(num_tokens, num_tokens * num_topk * shape.row_bytes) > 1
        ):
            return None
        self._use.stage = shape.stages[0]
        with self._use as engine:
            if shape not in self._idle and len(self._idle) == _MOST_SHAPES:
                self.forget()
            idle = self._idle.setdefault(shape, [])
            try:
                pair = idle.pop() if idle else _new_pair(engine, shape)
            except ValueError:
                return None
            except Exception as error:
                engine.reject(shape.stages[0], error)
            rows = pair.dispatch(x, topk_idx, topk_weights)
        for tell in observers.dispatched:
            tell(engine, x, topk_idx, topk_weights, num_experts)
        return Step(self._use, shape, pair, idle, rows)


class Step:
    """A dispatch of a layer, and its combine, after which the exchange is free for the next.

    x is [M, D] by (expert, source rank, token), offsets [L] int32, where each expert's rows end.
    """

    __slots__ = ("_back_to", "_pair", "_shape", "_use", "offsets", "x")

    def __init__(
        self,
        use: Use,
        shape: Shape,
        pair: StandingPair,
        back_to: list[StandingPair],
        rows: PreparedRows,
    ) -> None:
        self._use, self._shape, self._pair, self._back_to = use, shape, pair, back_to
        offsets = rows.offsets
        assert offsets is not None
        self.x, self.offsets = rows.x, offsets

    def combine(self, y: Tensor, *, weigh: bool = True, out: Tensor | None = None) -> Tensor:
        """What combine_by_expert does, once."""
        shape, pair = self._shape, self._pair
        self._use.stage = shape.stages[1]
        with self._use as engine:
            if (
                type(y) is Tensor
                and y.dtype is shape.dtype
                and y.shape[1:] == (shape.hidden,)
                and num_threads(y.shape[0], y.shape[0] * shape.row_bytes) == 1
            ):
                sums = pair.combine(y, weigh, out)
            else:  # what experts may return too, or what threads share, where much has come
                request = CombineRequest.plain(y, pair.handle(), out, shape.config, shape.tag)
                sums = engine.calls.combine_by_expert(request, weigh)
            self._back_to.append(pair)
        return sums


def _new_pair(engine: Engine, shape: Shape) -> StandingPair:
    assert isinstance(engine.calls, SharedCalls)
    with torch.inference_mode(False):  # its memory may be used outside of it
        return StandingPair(engine, engine.calls, checked_shape(engine, shape))


def few_of(engine: Engine, use: Use, config: Config) -> Few | None:
    """The exchange of few tokens; None where calls are not compiled."""
    has_balance = engine.local.balance is not None
    return Few(use, config, has_balance) if isinstance(engine.calls, SharedCalls) else None
