"""A prepared exchange: the calls of one shape, checked once, with memory of their own.

`pair_of` finds the best that there is for a shape: compiled calls over tables that stay, where all
ranks share memory (`engine.standing`), else the engine's calls, whose handle is kept here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.inputs import CombineRequest, DispatchRequest
from tokenyard.results import Handle
from tokenyard.runtime.completion import AT_ONCE
from tokenyard.types import ROW_DTYPES, Config

if TYPE_CHECKING:
    from tokenyard.engine.engine import Engine

# What ranks are told that this one calls.
DISPATCH, COMBINE = "dispatch", "combine"
BY_EXPERT = " by expert"
_MOST_TOKENS = 1 << 24
_MOST_ALIGNED = 1 << 16


class Shape(NamedTuple):
    """What all calls of a prepared exchange have in common."""

    max_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    dtype: torch.dtype
    by_expert: bool
    expert_alignment: int
    config: Config
    tag: int = -1
    leaves_rows: bool = False  # to their holder when their memory's turn comes: by expert

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    @property
    def stages(self) -> tuple[str, str]:
        more = BY_EXPERT if self.by_expert else ""
        return DISPATCH + more, COMBINE + more

    def request(self, x: Any, topk_idx: Any, topk_weights: Any) -> DispatchRequest:
        routing = topk_idx, topk_weights, self.num_experts, self.expert_alignment
        return DispatchRequest.plain(x, *routing, self.config, self.tag)

    def check(self, x: Any, topk_idx: Any) -> None:
        """Raises ValueError if a dispatch is none that was prepared. Leaves what is no matrix at
        all to the checks of every dispatch.
        """
        if not (isinstance(x, Tensor) and isinstance(topk_idx, Tensor)):
            validate.require(
                not isinstance(x, tuple), f"x is a pair, want a tensor of {self.dtype}"
            )
            return
        got = x.shape[-1:], topk_idx.shape[-1:], x.dtype
        want = (self.hidden,), (self.num_topk,), self.dtype
        for name, one, other in zip(("hidden", "num_topk", "dtype"), got, want):
            if one != other:
                told = [value[0] if isinstance(value, tuple) else value for value in (one, other)]
                raise ValueError(f"{name} is {told[0]}, want {told[1]}, which was prepared")
        if x.ndim == 2 and x.shape[0] > self.max_tokens:
            raise ValueError(
                f"x has {x.shape[0]} tokens, want at most {self.max_tokens}, which were prepared"
            )


def checked_shape(engine: Engine, shape: Shape) -> Shape:
    """Raises ValueError if nothing of such a shape can be prepared."""
    for name in ("max_tokens", "hidden", "num_topk"):
        validate.integer(name, getattr(shape, name), at_least=1, at_most=_MOST_TOKENS)
    validate.integer("expert_alignment", shape.expert_alignment, at_least=1, at_most=_MOST_ALIGNED)
    engine.local.placement(shape.num_experts)
    validate.require(
        shape.dtype in validate.SUMMABLE and shape.dtype in ROW_DTYPES,
        f"dtype is {shape.dtype}, want one that can be summed: {validate.SUMMABLE}",
    )
    validate.switch("by_expert", shape.by_expert)
    return shape


class Memory(Protocol):
    """Where the rest of what a dispatch brings lies."""

    def per_expert(self) -> list[int]: ...
    def offsets(self) -> Tensor | None: ...
    def topk_idx(self, num_rows: int) -> Tensor | None: ...
    def topk_weights(self, num_rows: int) -> Tensor | None: ...


class PreparedRows:
    """What a prepared dispatch brings, good until the next dispatch but one: x, and, made when
    somebody asks, what the properties say.

    x is [M, D] by (expert, source rank, token), or, not by expert, [N, D] by (source rank, token).
    """

    __slots__ = ("_memory", "x")

    def __init__(self, x: Tensor, memory: Memory) -> None:
        self.x, self._memory = x, memory

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has lists of its own."""
        lists = self.num_tokens_per_expert, self.offsets, self.topk_idx, self.topk_weights
        return PreparedRows, (self.x, Given(*lists))

    @property
    def num_tokens_per_expert(self) -> list[int]:
        """How many rows each local expert has, rounded up to expert_alignment."""
        return self._memory.per_expert()

    @property
    def offsets(self) -> Tensor | None:
        """[L] int32, by expert: where each local expert's rows end, as grouped_mm wants them."""
        return self._memory.offsets()

    @property
    def topk_idx(self) -> Tensor | None:
        """[N, K], not by expert: local expert ids, -1 where an expert lives elsewhere."""
        return self._memory.topk_idx(self.x.shape[0])

    @property
    def topk_weights(self) -> Tensor | None:
        """[N, K], not by expert: the weights, 0 where an expert lives elsewhere."""
        return self._memory.topk_weights(self.x.shape[0])


class Given(NamedTuple):
    """What the engine's calls have brought."""

    counts: list[int]
    ends: Tensor | None = None
    ids: Tensor | None = None
    weights: Tensor | None = None

    def per_expert(self) -> list[int]:
        return self.counts

    def offsets(self) -> Tensor | None:
        return self.ends

    def topk_idx(self, num_rows: int) -> Tensor | None:
        return self.ids

    def topk_weights(self, num_rows: int) -> Tensor | None:
        return self.weights


class Pair(Protocol):
    """A dispatch and a combine of one shape."""

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any) -> PreparedRows: ...
    def combine(self, y: Any, weigh: Any, out: Any) -> Tensor: ...


class OrdinaryPair:
    """The engine's own calls."""

    def __init__(self, engine: Engine, shape: Shape) -> None:
        self._engine, self._shape = engine, shape
        self._handle: Handle | None = None

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any) -> PreparedRows:
        engine, shape, stage = self._engine, self._shape, self._shape.stages[0]
        request = shape.request(x, topk_idx, topk_weights)
        try:
            validate.require(topk_idx is not None, "topk_idx is None, want a torch.Tensor")
            shape.check(x, topk_idx)
        except Exception as error:
            engine.reject(stage, error)
        if shape.by_expert:
            rows, self._handle = engine.calls.dispatch_by_expert(request)
            return PreparedRows(rows.x, Given(rows.num_tokens_per_expert, rows.offsets))
        got, self._handle, _ = engine.calls.dispatch(request, AT_ONCE, stage)
        lists = Given(got.num_tokens_per_expert, None, got.topk_idx, got.topk_weights)
        return PreparedRows(got.x, lists)

    def combine(self, y: Any, weigh: Any, out: Any) -> Tensor:
        engine, shape, stage = self._engine, self._shape, self._shape.stages[1]
        if self._handle is None:
            engine.reject(stage, nothing_dispatched())
        request = CombineRequest.plain(y, self._handle, out, shape.config, shape.tag)
        if shape.by_expert:
            return engine.calls.combine_by_expert(request, weigh)
        return engine.calls.combine(request, AT_ONCE, stage)[0]


def nothing_dispatched() -> ValueError:
    return ValueError("combine before the first dispatch, want a dispatch that it answers")
