"""A part of a group takes fewer rows than it has room for, and leaves the rest of it alone."""

from __future__ import annotations

import pytest

from tests.cases.processes import Pools
from tests.cases.shorter_messages import check, shorter
from tokenyard.testing import run_virtual


def test_virtual_ranks() -> None:
    check(run_virtual(shorter, 3).results)


@pytest.mark.processes
def test_processes(processes: Pools) -> None:
    check(processes(3).run(shorter))
