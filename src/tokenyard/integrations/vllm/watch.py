"""Logs at once which rank has died, and tells other processes what Buffers did (`metrics`).

An exchange with a dead rank raises PeerDied. But when a worker dies, vLLM ends all others within a
second, and ranks that are not in an exchange just then would end without saying why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tokenyard.buffer import Buffer
from tokenyard.errors import PeerDied, name_ranks
from tokenyard.integrations.vllm import metrics

_LOOK = 0.05  # seconds between looks
# Seconds until a death is told: at the end of a server ranks go one by one, and soon so does this.
_CONFIRM = 0.1


class Watch:
    def __init__(self, buffer: Buffer, log: Any, publish: Callable[[], None] | None = None) -> None:
        """`publish`, if given, is called every so often (`metrics`)."""
        self._buffer, self._log = buffer, log
        self._publish, self._published = publish, 0.0
        self._end = threading.Event()
        thread = threading.Thread(target=self._watch, daemon=True, name="tokenyard-watch")
        thread.start()

    def stop(self) -> None:
        self._end.set()

    def _watch(self) -> None:
        while not self._end.wait(_LOOK):
            if self._publish is not None and time.monotonic() > self._published + metrics.EVERY:
                self._published = time.monotonic()
                self._publish()
            dead = self._buffer.dead_ranks()
            if dead and not self._end.wait(_CONFIRM):
                text = f"{name_ranks(dead)} died, on rank {self._buffer.rank}"
                error = PeerDied(text, ranks=dead, stage="watch")
                self._log.error("%s: %s", type(error).__name__, error)
                return
