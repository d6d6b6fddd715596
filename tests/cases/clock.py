"""How long things may take. Every limit on the clock in a test goes through `scaled`, so that one
factor fits all of them to a slow or busy machine: TOKENYARD_TEST_SLOWNESS=4 pytest.

A limit that is not reached when all is well costs nothing: make it generous. A time that a test
waits out should be short.
"""

from __future__ import annotations

import os

SLOWNESS = float(os.environ.get("TOKENYARD_TEST_SLOWNESS", "1"))


def scaled(seconds: float) -> float:
    return seconds * SLOWNESS
