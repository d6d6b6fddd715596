"""DeepEP's tests of V2, untouched: test_ep.py, which compares bit for bit, and the small ones."""

from __future__ import annotations

import pytest

from tests.cases.deepep import needs_checkout, run_file

# The gate runs V1's tests; of V2 it runs our own, against `spec`.
pytestmark = [
    needs_checkout,
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

SMALL = ("--num-tokens", "32", "--hidden", "256", "--num-topk", "3", "--num-experts", "8")
USUAL = ("--num-tokens", "128", "--hidden", "1024", "--num-topk", "6", "--num-experts", "64")

# Handles copied or not, two alignments, FP8 or not, three numbers of biases, six ways of events.
MODES = 2 * 2 * 2 * 3 * 6


@pytest.mark.parametrize("num_processes", [2, 4])
def test_first_mode_with_its_measurements(num_processes: int) -> None:
    said = run_file("elastic/test_ep.py", num_processes, *SMALL, "--test-first-only")
    assert said.count("reduced combine: ") == num_processes


@pytest.mark.parametrize(
    "options",
    [
        ("--allow-multiple-reduction", "0", "--deterministic"),
        ("--do-cpu-sync", "0"),
        ("--allow-hybrid-mode", "0", "--masked-ratio", "0.3", "--seed", "1"),
    ],
    ids=lambda options: options[0],
)
def test_first_mode_with_options(options: tuple[str, ...]) -> None:
    said = run_file(
        "elastic/test_ep.py", 2, *SMALL, "--test-first-only", "--skip-perf-test", *options
    )
    assert said.count("> Testing with") == 1


ENTRIES = ("--num-entries", "1024", "--num-tokens", "16", "--num-entries-per-token", "4")
TENSORS = ("--num-tokens", "64", "--hidden", "256", "--num-sends", "16")


@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize(
    "name, options, ends_with",
    [
        ("barrier", (), "barrier time"),
        ("engram", ENTRIES, "issue: "),
        ("engram", (*ENTRIES, "--use-fp8"), "issue: "),
        ("pp", TENSORS, "hide=0, concurrent=3"),
    ],
    ids=["barrier", "engram", "engram-fp8", "pp"],
)
def test_small_ones(
    name: str, options: tuple[str, ...], ends_with: str, num_processes: int
) -> None:
    said = run_file(f"elastic/test_{name}.py", num_processes, *options, limit=850)
    assert said.count(ends_with) == num_processes


@pytest.mark.parametrize("num_processes", [2, 4])
def test_all_modes(num_processes: int) -> None:
    said = run_file("elastic/test_ep.py", num_processes, *SMALL, "--skip-perf-test", limit=850)
    assert said.count("> Testing with") == MODES


@pytest.mark.parametrize(
    "options",
    [
        ("--do-cpu-sync", "0"),
        ("--allow-multiple-reduction", "0"),
        ("--allow-hybrid-mode", "0"),
        ("--deterministic",),
        ("--masked-ratio", "0.3"),
        ("--unbalanced-ratio", "1.5", "--precise-unbalanced-ratio"),
        ("--prefer-overlap-with-compute", "1", "--num-sms", "8", "--num-qps", "4"),
    ],
    ids=lambda options: options[0],
)
def test_all_modes_with_options(options: tuple[str, ...]) -> None:
    said = run_file("elastic/test_ep.py", 4, *USUAL, "--skip-perf-test", *options, limit=850)
    assert said.count("> Testing with") == MODES
