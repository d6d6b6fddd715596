"""The parameters of a benchmark. Loads nothing heavy: the command line shows their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is measured, and how long. Each benchmark takes some of these parameters."""

    ranks: int = 2
    tokens: tuple[int, ...] = (1024,)  # of each rank; one case for each number
    hidden: int = 7168
    topk: int = 8
    experts: int = 64
    intermediate: int = 256
    transport: str = "auto"
    fp8: bool = False
    dtype: str = "bfloat16"  # of rearrange's tensors
    cases: int = 10  # of rearrange's list, from its begin
    rounds: int = 9
    slow_rank: int | None = None  # a rank that is slowed on purpose

    def check(self) -> None:
        """Raise ValueError for what no benchmark can measure."""
        from tokenyard import validate

        for name in ("ranks", "hidden", "topk", "experts", "intermediate", "cases"):
            validate.integer(name, getattr(self, name), at_least=1)
        validate.integer("rounds", self.rounds, at_least=2)
        validate.require(bool(self.tokens), "tokens is empty, want at least one number")
        dtypes = ("bfloat16", "float16", "float32", "float64")
        validate.require(
            self.dtype in dtypes, f"dtype is {self.dtype!r}, want one of {', '.join(dtypes)}"
        )
        for tokens in self.tokens:
            validate.integer("tokens", tokens, at_least=1)
        validate.require(
            self.topk <= self.experts,
            f"topk is {self.topk}, want at most experts ({self.experts})",
        )
        if self.slow_rank is not None:
            validate.integer("slow_rank", self.slow_rank, at_least=0, at_most=self.ranks - 1)

    def named(self, names: Sequence[str]) -> dict[str, Any]:
        """These parameters as plain values, for a report."""
        given = asdict(self) | {"tokens": list(self.tokens)}
        return {one.name: given[one.name] for one in fields(self) if one.name in names}
