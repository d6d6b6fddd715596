"""Figures of the plugin's Buffers, on the page where vLLM shows its own (/metrics).

Buffers live in vLLM's worker processes, and the page is served by another one. It hears of them if
PROMETHEUS_MULTIPROC_DIR names a folder when the server is started, as vLLM itself has it for
several API servers. Otherwise only a server that computes in its own process shows the figures.
"""

from __future__ import annotations

from typing import Any

from tokenyard.buffer import Buffer
from tokenyard.runtime import variables

EVERY = 1.0  # seconds between two copies for other processes

_publisher: Any = None


def show(buffer: Buffer, log: Any) -> Any:
    """Show a Buffer's figures. Returns what must be called every so often, or None."""
    global _publisher
    try:
        import prometheus_client

        from tokenyard.integrations.prometheus import BufferCollector, Publisher
    except ImportError:
        return None
    try:
        if not variables.read("PROMETHEUS_MULTIPROC_DIR"):
            prometheus_client.REGISTRY.register(BufferCollector(buffer))
            return None
        if _publisher is None:
            _publisher = Publisher()
        _publisher.add(buffer)
    except ValueError as error:  # another Buffer of this process is shown already
        log.info("metrics of %r are not shown: %s", buffer, error)
        return None
    return _publisher.publish
