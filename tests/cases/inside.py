"""What tests must touch inside a Buffer, since no public call leads there: to let threads share
little, to hold up its thread, to make a rank lie. What a Buffer has done, `Buffer.stats` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import tokenyard
from tokenyard.runtime import threads
from tokenyard.wire import call
from tokenyard.wire import message as say

# Steps of a compiled call between nodes at which its rank can go on step by step: once it has told
# the others about the call, or has heard from them. NOWHERE: it goes on to the end.
NOWHERE, POSTED, MET = 0, call.POSTED, call.MET

_THREADS = threads.MUCH, threads._BYTES_PER_THREAD


def engine_of(buffer: tokenyard.Buffer) -> Any:
    assert buffer._engine is not None, "the Buffer is closed"
    return buffer._engine


def transport_of(buffer: tokenyard.Buffer) -> Any:
    return engine_of(buffer).transport


def worker_of(buffer: tokenyard.Buffer) -> Any:
    """The thread on which rows of asynchronous calls move."""
    return engine_of(buffer).worker


def slots_of(buffer: tokenyard.Buffer) -> Any:
    """Its low-latency calls."""
    assert buffer._low_latency is not None
    return buffer._low_latency


def leave_compiled_calls_at(buffer: tokenyard.Buffer, step: int) -> None:
    """From now on this rank leaves compiled calls between nodes at this step, unless its Buffer is
    closed.
    """
    if buffer._engine is not None:
        buffer._engine.calls.leave_at = step  # type: ignore[attr-defined]


def share_from(num_bytes: int | None) -> None:
    """Threads share whatever has so many bytes; None: as they do outside of tests."""
    threads.MUCH, threads._BYTES_PER_THREAD = _THREADS if num_bytes is None else (num_bytes, 1)


@contextmanager
def little_is_much() -> Iterator[None]:
    """Three threads share whatever there is to move in this process."""
    kept = torch.get_num_threads()
    share_from(1)
    torch.set_num_threads(3)
    try:
        yield
    finally:
        share_from(None)
        torch.set_num_threads(kept)


def send_instead(
    buffer: tokenyard.Buffer, stage: str, words: dict[int, int], payload: Sequence[int] = ()
) -> None:
    """In place of a call that was made before: send all ranks its message with other words, and
    another payload.
    """
    engine: Any = engine_of(buffer)
    (plan,) = [one for one in engine.calls.plans._known.values() if one.shape.stage == stage]
    message = np.zeros((buffer.group_size, say.MESSAGE_WORDS), np.int64)
    message[:, : say.PAYLOAD] = plan.head
    message[:, say.NUMBER] = engine.agreement.number
    for word, value in words.items():
        message[:, word] = value
    message[:, say.PAYLOAD : say.PAYLOAD + len(payload)] = payload
    engine.transport.exchange(message, stage)


def forget_a_call(buffer: tokenyard.Buffer) -> None:
    """This rank has counted one call less than the others."""
    engine_of(buffer).agreement.number -= 1


def give_up(buffer: tokenyard.Buffer, error: Exception) -> None:
    """This rank has met an error, of which it tells the others."""
    engine_of(buffer).failure.give_up(error)
