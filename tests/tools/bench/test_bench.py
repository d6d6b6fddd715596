"""Benchmarks: every one verifies and measures; a wrong result is never timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases.clock import scaled
from tests.cases.processes import Pools
from tokenyard.tools.bench import memory
from tokenyard.tools.bench.case import Case, Way
from tokenyard.tools.bench.catalogue import BENCHMARKS
from tokenyard.tools.bench.picture import draw
from tokenyard.tools.bench.report import Figure, Measured, Report, load, save
from tokenyard.tools.bench.running import WrongResult, job, run, slowest, verify_and_measure
from tokenyard.tools.bench.shape import Shape
from tokenyard.tools.bench.timing import Alone, Timed, measure

TINY = Shape(tokens=(8,), hidden=256, topk=2, experts=8, intermediate=64, cases=1, rounds=2)
LOCAL = [name for name, one in BENCHMARKS.items() if one.is_local]
ON_RANKS = [name for name in BENCHMARKS if name not in LOCAL]


def report(name: str = "dispatch", **medians: float) -> Report:
    figures = [
        Figure(way, way != "memcpy", Timed(median, median * 0.99, median * 1.01, 9, 1))
        for way, median in medians.items()
    ]
    return Report(name, {"ranks": 2}, [Measured("8 tokens", "memcpy", 4096, figures)])


@pytest.mark.parametrize("name", LOCAL)
def test_a_local_benchmark_runs_here(name: str) -> None:
    threads = torch.get_num_threads()
    said: list[str] = []
    got = run(name, TINY, say=said.append)
    assert said == [case.label for case in got.measured]
    for case in got.measured:
        assert case.of(case.base) is not None
        assert {one.ours for one in case.figures} == {True, False}
        assert all(0 < one.timed.low <= one.timed.median for one in case.figures)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("name", ON_RANKS)
def test_a_benchmark_of_ranks_knows_its_memory(name: str) -> None:
    shape = BENCHMARKS[name].shape
    alone = memory.needed(name, TINY)
    assert TINY.ranks * memory.PROCESS < alone < 1 << 30
    assert alone < memory.needed(name, shape) < 4 << 30  # the defaults run on a laptop
    assert memory.needed(name, replace(shape, ranks=4)) > 2 * memory.needed(name, shape)
    assert memory.needed(name, replace(shape, tokens=(*shape.tokens, 1))) == memory.needed(
        name, shape
    )


@pytest.mark.processes
@pytest.mark.parametrize("name", ON_RANKS)
def test_a_benchmark_of_ranks_verifies_and_measures(name: str, processes: Pools) -> None:
    for cases in processes(2).run(job, name, TINY, 8):
        (case,) = cases
        assert case["wrong"] is None
        measured = case["measured"]
        assert measured.of(measured.base).median > 0
        assert any(one.ours for one in measured.figures)
        assert case["transport"] == "direct"


@pytest.mark.processes
def test_ranks_are_started_for_a_run(tmp_path: Path) -> None:
    said: list[str] = []
    got = run("combine", TINY, say=said.append, timeout=scaled(120))
    assert said == ["8 tokens on each of 2 ranks"]
    assert got.parameters["ranks"] == 2
    assert got.absent["MPI"]
    assert {"memcpy", "roof", "gloo all_to_all", "combine"} <= {
        one.way for one in got.measured[0].figures
    }
    save(tmp_path / "report.json", [got])
    assert load(tmp_path / "report.json") == [got]


@pytest.mark.processes
def test_a_rank_that_was_slowed_is_named(processes: Pools) -> None:
    shape = replace(TINY, rounds=5, slow_rank=1)
    ranks = processes(2).run(job, "dispatch", shape, 8)
    told: Any = slowest([[cases[0] for cases in ranks]])
    assert told["rank"] == 1
    assert told["text"].startswith("ranks waited most for rank 1: ")


def case_of(got: int, calls: list[str]) -> Case:
    return Case(
        label="a case",
        ours={"ours": Way(lambda: calls.append("ours"))},
        beside={"theirs": Way(lambda: calls.append("theirs"))},
        checks=lambda: [("the sum", got, 3)],
        base="theirs",
    )


def test_a_wrong_result_is_not_timed() -> None:
    calls: list[str] = []
    found = verify_and_measure(case_of(4, calls), Alone(), 3)
    assert found == {"wrong": "a case: the sum is 4, want 3"}
    assert calls == []


def test_a_wrong_result_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tokenyard.tools.bench.local.torch_align", lambda *given: [torch.zeros(1)] * 3
    )
    with pytest.raises(WrongResult, match=r"rank 0: 8 tokens, blocks of 64: align, beside torch's"):
        run("align", TINY)


def test_ways_take_turns() -> None:
    calls: list[str] = []
    ways = {
        name: Way(lambda name=name: calls.append(name), lambda got: None)  # type: ignore[misc]
        for name in "ab"
    }
    timed = measure(ways, Alone(), 2)
    assert calls == ["a", "a", "b", "b", *"ab", *"ba"]  # to warm up, forwards, backwards
    assert timed["a"].rounds == 2


@pytest.mark.parametrize(
    "given, text",
    [
        ({"ranks": 0}, "ranks is 0, want at least 1"),
        ({"topk": 9, "experts": 8}, r"topk is 9, want at most experts \(8\)"),
        ({"rounds": 1}, "rounds is 1, want at least 2"),
        ({"tokens": (4, 0)}, "tokens is 0, want at least 1"),
        ({"slow_rank": 2}, "slow_rank is 2, want at most 1"),
    ],
)
def test_bad_parameters_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run("dispatch", replace(TINY, **given))


def test_reports_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    kept = [report(memcpy=1.0, dispatch=2.0), report("combine", memcpy=1.0)]
    save(path, kept)
    assert load(path) == kept
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"cannot use .*two.json: it holds no report"):
        load(path)
    with pytest.raises(ValueError, match=r"cannot read .*none.json: No such file"):
        load(tmp_path / "none.json")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_report_is_drawn(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture.{ending}"
    draw(report(memcpy=1.0, dispatch=2.0), path)
    begin = path.read_bytes()[:200]
    assert b"PNG" in begin if ending == "png" else b"<?xml" in begin
