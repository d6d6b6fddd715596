"""Traces and recordings that the environment asks for: TOKENYARD_TRACE, TOKENYARD_RECORD."""

from __future__ import annotations

from tokenyard.observe import recording, tracing
from tokenyard.runtime import observers


def listen() -> None:
    """From now on, where Buffers open and close. Reads nothing before that."""
    observers.add("opening", recording.begin_from_environment)
    observers.add("opening", tracing.begin_from_environment)
    observers.add("closed", tracing.write_for_environment)
