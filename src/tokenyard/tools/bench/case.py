"""A case of a benchmark: one piece of work, and the ways to do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Way:
    """One way to do the work of a case.

    With `after` only the time until `call` returns counts. `after` gets what it returned.
    """

    call: Callable[[], Any]
    after: Callable[[Any], object] | None = None


Check = tuple[str, Any, Any]  # what is compared, what we got, what it must be


@dataclass(frozen=True, kw_only=True)
class Case:
    """Ways to do one piece of work, and how to verify them.

    `checks` calls our ways on all ranks and returns what must be equal. It compares nothing itself,
    so that ranks never part in the middle of it.
    """

    label: str
    ours: dict[str, Way]
    beside: dict[str, Way]
    checks: Callable[[], list[Check]]
    base: str  # the way that ratios refer to
    num_bytes: int | None = None  # that one call brings to this rank
    stats: Callable[..., dict[str, Any]] | None = None  # Buffer.stats
    absent: dict[str, str] = field(default_factory=dict)  # who is not measured, and why
