"""What a process may open."""

from __future__ import annotations

import pytest

from tests.cases.programs import run_python

RAISES = """
import logging, os, resource
from tokenyard.runtime import limits

logging.basicConfig(level=logging.INFO)
used, hard = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, hard))
limits.allow_files(10, "connections")
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == used + 100
limits.allow_files(200, "connections")
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= used + 200
"""


@pytest.mark.timeout(120)
def test_a_limit_that_is_raised_is_told() -> None:
    pytest.importorskip("resource", reason="there are no such limits")
    done = run_python("-c", RAISES, limit=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this process may open") == 1
    assert "for connections" in done.stderr
