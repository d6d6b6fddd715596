"""Which benchmarks there are: names, parameters and their defaults. Loads nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenyard.tools.bench.shape import Shape

if TYPE_CHECKING:
    from tokenyard.tools.bench.case import Case

_ON_RANKS = ("ranks", "tokens", "hidden", "topk", "experts", "rounds", "slow_rank")
_EXCHANGE = (*_ON_RANKS, "transport")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark: its name, its parameters, and where its cases are.

    `cases()(group, shape, tokens)` runs on every rank, for each number of tokens. Without "ranks"
    among its parameters a benchmark runs in this process alone, and the group is None.
    """

    name: str
    summary: str
    takes: tuple[str, ...]  # parameters that can be given
    shape: Shape  # their defaults: a run of at most 20 seconds
    where: str  # "module:function" of this folder

    @property
    def is_local(self) -> bool:
        return "ranks" not in self.takes

    def cases(self) -> Callable[[Any, Shape, int], Generator[Case]]:
        module, function = self.where.split(":")
        return getattr(import_module(f"tokenyard.tools.bench.{module}"), function)


_ALL = [
    Benchmark(
        name="dispatch",
        summary="Send every token to the ranks of its experts.",
        takes=_EXCHANGE,
        shape=Shape(),
        where="exchange:dispatch",
    ),
    Benchmark(
        name="combine",
        summary="Bring the experts' rows back to their tokens and sum them.",
        takes=_EXCHANGE,
        shape=Shape(),
        where="exchange:combine",
    ),
    Benchmark(
        name="few",
        summary="Dispatch and combine of few tokens, as in decoding.",
        takes=_EXCHANGE,
        shape=Shape(tokens=(1, 8, 32, 128), hidden=2048),
        where="pairs:few_tokens",
    ),
    Benchmark(
        name="sizes",
        summary="Dispatch and combine of changing sizes, as in a server.",
        takes=_EXCHANGE,
        shape=Shape(tokens=(64,), hidden=2048),
        where="pairs:changing_sizes",
    ),
    Benchmark(
        name="low-latency",
        summary="The low-latency mode beside the normal one.",
        takes=(*_EXCHANGE, "fp8"),
        shape=Shape(tokens=(1, 8, 64)),
        where="pairs:low_latency",
    ),
    Benchmark(
        name="by-expert",
        summary="Rows by expert in one call, beside permute and unpermute.",
        takes=_EXCHANGE,
        shape=Shape(tokens=(32, 512), hidden=2048),
        where="pairs:by_expert",
    ),
    Benchmark(
        name="elastic",
        summary="DeepEP V2's expanded rounds beside rows by expert.",
        takes=_ON_RANKS,
        shape=Shape(tokens=(32, 512), hidden=2048),
        where="pairs:elastic",
    ),
    Benchmark(
        name="model",
        summary="A training step of the MoE layer beside gathering all tokens.",
        takes=(*_EXCHANGE, "intermediate"),
        shape=Shape(tokens=(256,), hidden=1024, topk=2, experts=32, rounds=7),
        where="model:model",
    ),
    Benchmark(
        name="align",
        summary="moe_align_block_size beside the same in torch operations.",
        takes=("tokens", "topk", "experts", "rounds"),
        shape=Shape(tokens=(1, 64, 4096, 65536), experts=256),
        where="local:align",
    ),
    Benchmark(
        name="layout",
        summary="Who gets each token, beside the same in torch operations.",
        takes=("tokens", "topk", "experts", "rounds"),
        shape=Shape(tokens=(128, 4096, 8192), experts=256),
        where="local:layout",
    ),
    Benchmark(
        name="permute",
        summary="permute and unpermute beside memcpy and torch.",
        takes=("tokens", "hidden", "topk", "rounds"),
        shape=Shape(tokens=(1024,)),
        where="local:permute",
    ),
    Benchmark(
        name="fp8",
        summary="FP8 casts beside the same in torch operations.",
        takes=("tokens", "hidden", "rounds"),
        shape=Shape(tokens=(1, 128, 1024)),
        where="local:fp8",
    ),
    Benchmark(
        name="rearrange",
        summary="Transpositions beside Tensor.copy_ and a plain copy.",
        takes=("cases", "dtype", "rounds"),
        shape=Shape(rounds=5),
        where="rearranging:rearrange",
    ),
]

BENCHMARKS = {one.name: one for one in _ALL}
