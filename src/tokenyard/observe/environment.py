"""Traces and recordings that the environment asks for: TOKENYARD_TRACE, TOKENYARD_RECORD."""

from __future__ import annotations

from tokenyard.observe import recording, tracing
from tokenyard.runtime import observers


def listen() -> None:
    """Do what the environment asks for wherever a Buffer opens or closes; read nothing before."""
    observers.add("opening", recording.begin_from_environment)
    observers.add("opening", tracing.begin_from_environment)
    observers.add("closed", tracing.write_for_environment)
