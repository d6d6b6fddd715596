"""What is taken for a leak: that which stays, and not that which goes a little later."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tests.cases.clock import scaled
from tests.fuzz.leaks import Holdings


def test_what_stays_is_named(tmp_path: Path) -> None:
    before = Holdings.now()
    with open(tmp_path / "kept", "w"):
        (count, names) = before.grown(seconds=0.1)
    assert count == f"descriptors: {before.descriptors + 1}, before {before.descriptors}"
    assert names == f"new files: ['{tmp_path}/kept']"
    assert before.grown() == []


def test_what_goes_later_is_none(tmp_path: Path) -> None:
    before = Holdings.now()
    file = open(tmp_path / "kept", "w")  # noqa: SIM115, which the thread closes

    def close() -> None:
        time.sleep(scaled(0.5))
        file.close()

    thread = threading.Thread(target=close)
    thread.start()
    assert before.grown() == []
    thread.join()
