"""Who is told of this process's Buffers and is no part of them, for example traces and recordings.

The core tells them, and knows none. They run on the thread of the call, and must not raise but
where a Buffer opens: other ranks wait.

    opening     (): a Buffer is about to open
    dispatched  (engine, x, topk_idx, topk_weights, num_experts): a dispatch of tokens that are
                routed anew has gone well on this rank; low-latency ones have no weights
    closed      (): a Buffer was closed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Observer = Callable[..., Any]

opening: tuple[Observer, ...] = ()
dispatched: tuple[Observer, ...] = ()
closed: tuple[Observer, ...] = ()


def add(event: str, observer: Observer) -> None:
    """Tell this observer too of such events, once each."""
    if observer not in globals()[event]:
        globals()[event] += (observer,)


def remove(event: str, observer: Observer) -> None:
    globals()[event] = tuple(one for one in globals()[event] if one != observer)
