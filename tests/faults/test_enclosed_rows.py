"""Calls whose rows travel with the words of the agreement fail as all others do: on all ranks."""

from __future__ import annotations

import pytest

from tests.cases.clock import scaled
from tests.cases.enclosed_errors import check, fail
from tests.cases.processes import Pools
from tokenyard.testing import run_virtual

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("size, per_node", [(2, 1), (4, 2), (6, 3)], ids=str)
def test_virtual_ranks(size: int, per_node: int) -> None:
    check(run_virtual(fail, size, per_node, timeout=scaled(120)).results)


@pytest.mark.processes
@pytest.mark.parametrize("size, per_node", [(2, 1), (4, 2)], ids=str)
def test_processes(size: int, per_node: int, processes: Pools) -> None:
    check(processes(size).run(fail, per_node))
