"""What all tests share: one pool of processes for the whole run, and time limits."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import pytest

from tests.cases.clock import SLOWNESS, scaled
from tests.cases.processes import Pools
from tokenyard.testing import Processes, run_processes, run_virtual

ONE_OF = 3

# What a test gives no limit has ours, which is for an idle machine.
for started in (run_virtual, run_processes, Processes.__init__):
    started.__kwdefaults__["timeout"] = scaled(started.__kwdefaults__["timeout"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_triton_to_the_night(items)
    scale_limits(config, items)


def leave_triton_to_the_night(items: list[pytest.Item]) -> None:
    """Triton's interpreter is slow, and few have a GPU to break: of a test with many parameters the
    gate interprets the first, and one of three of the others. Here, so that the same are `slow`
    whatever rooms are collected.
    """
    seen = set()
    for item in items:
        if item.get_closest_marker("triton") is None:
            continue
        test = item.nodeid.split("[")[0]
        if test in seen and crc32(item.nodeid.encode()) % ONE_OF:
            item.add_marker(pytest.mark.slow)
        seen.add(test)


def scale_limits(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scale the time limit of every test to the machine."""
    if SLOWNESS == 1:
        return
    usual = float(config.getini("timeout"))
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit = float(marker.args[0]) if marker is not None else usual
        item.add_marker(pytest.mark.timeout(scaled(limit)), append=False)


@pytest.fixture(scope="session")
def processes() -> Iterator[Pools]:
    """processes(4): four ranks that stay for later tests. With pytest-xdist, of one worker."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def two_processes(processes: Pools) -> Processes:
    return processes(2)
