"""The group of this run, however it was started."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import tokenyard
from tests.cases.processes import Pools
from tests.cases.programs import run_python

ALONE = """
import torch.distributed as dist
import tokenyard
group = tokenyard.local_group()
assert group is tokenyard.local_group() is dist.group.WORLD
print(group.rank(), group.size(), dist.get_backend())
"""


def test_a_process_without_a_launcher_is_alone_and_leaves_quietly() -> None:
    done = run_python("-c", ALONE, limit=60)
    assert (done.stdout, done.stderr, done.returncode) == ("0 1 gloo\n", "", 0)


def use_the_default_group(group: Any) -> bool:
    return tokenyard.local_group() is dist.group.WORLD


@pytest.mark.processes
def test_the_default_group_is_taken_where_there_is_one(processes: Pools) -> None:
    assert processes(2).run(use_the_default_group) == [True, True]
