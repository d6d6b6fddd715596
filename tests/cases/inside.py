"""What tests must touch inside a Buffer, since no public call leads there: to force a way, to hold
up its thread, to make a rank lie. What a Buffer has done, `Buffer.stats` says.
"""

from __future__ import annotations

from typing import Any

import tokenyard
from tokenyard.wire import exchange_table

# Steps of a compiled call at which its rank can go on step by step: once it has told the others
# about the call, or has heard from them. NOWHERE: it goes on to the end.
NOWHERE, POSTED, HEARD = 0, exchange_table.POSTED, exchange_table.HEARD


def engine_of(buffer: tokenyard.Buffer) -> Any:
    assert buffer._engine is not None, "the Buffer is closed"
    return buffer._engine


def transport_of(buffer: tokenyard.Buffer) -> Any:
    return engine_of(buffer).transport


def worker_of(buffer: tokenyard.Buffer) -> Any:
    """The thread on which rows of asynchronous calls move."""
    return engine_of(buffer).worker


def slots_of(buffer: tokenyard.Buffer) -> Any:
    """Of its low-latency calls."""
    assert buffer._low_latency is not None
    return buffer._low_latency.slots


def without_compiled_calls(buffer: tokenyard.Buffer) -> None:
    """From now on this rank makes all calls step by step."""
    engine_of(buffer).compiled = None


def leave_compiled_calls_at(buffer: tokenyard.Buffer, step: int) -> None:
    """From now on this rank leaves compiled calls at this step, if it makes any."""
    if buffer._engine is not None and buffer._engine.compiled is not None:
        buffer._engine.compiled.leave_at = step


def write_by_expert_in_one_step(buffer: tokenyard.Buffer, at_once: bool) -> None:
    """Whether dispatches by expert write rows straight to their places, where they can, from now
    on. All ranks must say the same.
    """
    write_by_expert_in_one_step_from(buffer, 0 if at_once else 1 << 62)


def write_by_expert_in_one_step_from(buffer: tokenyard.Buffer, num_bytes: int) -> None:
    """Do so from so many bytes of all ranks' pairs on."""
    compiled: Any = engine_of(buffer).compiled
    if hasattr(compiled, "plans"):
        compiled.plans.much_from = num_bytes


def forget_a_call(buffer: tokenyard.Buffer) -> None:
    """This rank has counted one call less than the others."""
    engine_of(buffer).agreement.number -= 1


def give_up(buffer: tokenyard.Buffer, error: Exception) -> None:
    """This rank has met an error, of which it tells the others."""
    engine_of(buffer).failure.give_up(error)
