"""Bad input of one rank, of which the other ranks hear."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenyard.engine.stages import Engine


@contextmanager
def heard_by_all(engine: Engine, stage: str) -> Iterator[None]:
    """What raises inside, before this rank has told the others of its call, raises on all ranks."""
    try:
        yield
    except Exception as error:
        engine.refuse(engine.agreement.named(stage, error))
        raise AssertionError("a refusal raises") from error
