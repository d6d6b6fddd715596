"""DeepEP's tests of V1, untouched: test_intranode.py and test_low_latency.py."""

from __future__ import annotations

import pytest

from tests.cases.deepep import needs_checkout, run_file
from tests.cases.lanes import at_night

pytestmark = [needs_checkout, pytest.mark.processes, pytest.mark.timeout(600)]

SMALL = ("--num-tokens", "64", "--hidden", "512", "--num-topk", "4", "--num-experts", "8")
USUAL = ("--num-tokens", "128", "--hidden", "2048", "--num-topk", "8", "--num-experts", "64")

# Both modes of `previous_event`, of `async_finish`, of top-k, and three kinds of rows.
INTRANODE = 2 * 2 * 2 * 3


@pytest.mark.parametrize("num_processes", at_night([2, 4], gate=(2,)))
def test_intranode(num_processes: int) -> None:
    said = run_file("legacy/test_intranode.py", num_processes, *SMALL)
    assert said.count("... passed") == INTRANODE
    assert "Best combine" in said  # the end of its tuning, which goes through all sizes of chunks


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
def test_low_latency(num_processes: int) -> None:
    said = run_file("legacy/test_low_latency.py", num_processes, *SMALL)
    assert said.count("Dispatch send/recv time") == num_processes


@pytest.mark.parametrize("num_processes", at_night([2, 4], gate=(2,)))
def test_logfmt(num_processes: int) -> None:
    said = run_file("legacy/test_low_latency.py", num_processes, *SMALL, "--use-logfmt")
    assert said.count("Dispatch send/recv time") == num_processes


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [6, 8])
def test_shrink(num_processes: int) -> None:
    """Ranks 1, 3 and 5 stop, so fewer than six cannot pass: it expects all three to be masked."""
    sizes = ("--num-tokens", "32", "--hidden", "512", "--num-topk", "4", "--num-experts", "24")
    said = run_file("legacy/test_low_latency.py", num_processes, *sizes, "--shrink-test", limit=550)
    assert said.count("failed when first calling") == 3


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4, 8])
def test_intranode_with_larger_rows(num_processes: int) -> None:
    said = run_file("legacy/test_intranode.py", num_processes, *USUAL, "--allow-mnnvl", limit=550)
    assert said.count("... passed") == INTRANODE


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--allow-mnnvl", "--disable-nvlink"])
@pytest.mark.parametrize("num_processes", [2, 4, 8])
def test_low_latency_with_larger_rows(num_processes: int, option: str) -> None:
    said = run_file("legacy/test_low_latency.py", num_processes, *USUAL, option, limit=550)
    assert said.count("Dispatch send/recv time") == num_processes
