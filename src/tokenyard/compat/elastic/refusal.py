"""Bad input of one rank, of which the other ranks hear, and what ranks differ in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenyard.engine.engine import Engine
from tokenyard.errors import CallMismatch


@contextmanager
def heard_by_all(engine: Engine, stage: str) -> Iterator[None]:
    """What raises inside, before this rank has told the others of its call, raises on all ranks."""
    try:
        yield
    except Exception as error:
        engine.refuse(engine.agreement.named(stage, error))
        raise AssertionError("a refusal raises") from error


@contextmanager
def tag_means(what: str) -> Iterator[None]:
    """Say what the tag of the calls inside stands for, if ranks give different ones."""
    try:
        yield
    except CallMismatch as error:
        if error.what != "tag":
            raise
        text = str(error).replace("differ in tag", f"differ in {what}")
        raise CallMismatch(text, what=what) from None
