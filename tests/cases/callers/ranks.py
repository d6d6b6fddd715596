"""Ranks that import a caller of DeepEP as its authors ship it, and find tokenyard as `deep_ep`.

The callers come from PyPI (.ci/callers-env), each in a folder of its own: two versions of one
package are among them, so ranks are started for one caller and know no other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

from tests.cases.callers.settings import set_up
from tests.cases.clock import scaled
from tests.cases.processes import Pool
from tokenyard.compat import deep_ep_path

CALLERS = Path(
    os.environ.get("TOKENYARD_CALLERS", Path(__file__).parents[3] / ".ci" / "callers")
).resolve()


def why_not(caller: str) -> str:
    """Why a caller cannot be run here; "" if it can."""
    if (CALLERS / caller / ".complete").exists():
        return ""
    return f"{caller} is not at hand: .ci/callers-env DIRECTORY, and TOKENYARD_CALLERS=DIRECTORY"


class Callers:
    """callers("megatron-core", 2): two ranks that can import it, those of an earlier test if no
    other caller came between.
    """

    def __init__(self) -> None:
        # Where no process was started yet: import once what all callers import.
        forkserver.set_forkserver_preload(["tokenyard.testing.preloaded", "torch._dynamo"])
        forkserver.ensure_running()
        self._caller = ""
        self._pools: dict[int, Pool] = {}

    def __call__(self, caller: str, num_ranks: int, timeout: float = 120.0) -> Pool:
        if caller != self._caller or not self._is_usable(num_ranks):
            self.close()
            self._caller = caller
        if num_ranks not in self._pools:
            with _first_on_path(deep_ep_path.folder(), CALLERS / caller):
                self._pools[num_ranks] = Pool(num_ranks)
            self._pools[num_ranks].timeout = scaled(timeout)
            self._pools[num_ranks].run(set_up, caller)
        self._pools[num_ranks].timeout = scaled(timeout)
        return self._pools[num_ranks]

    def _is_usable(self, num_ranks: int) -> bool:
        return num_ranks not in self._pools or self._pools[num_ranks].is_usable

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()


@contextmanager
def _first_on_path(*folders: Path) -> Iterator[None]:
    """Processes that are started inside look there first, as with PYTHONPATH."""
    before = list(sys.path)
    sys.path[:0] = [str(folder) for folder in folders]
    try:
        yield
    finally:
        sys.path[:] = before
