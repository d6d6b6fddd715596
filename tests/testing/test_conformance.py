"""The self-test: it passes where all is well, and names what is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.cases.clock import scaled
from tests.cases.places import MAY_NOT, MEMFD_CREATE, SECCOMP
from tests.cases.programs import run_python
from tokenyard.testing import RankFailed, conformance, run_virtual
from tokenyard.testing.conformance import FAILED, LOW_LATENCY, NORMAL, NOT_HERE, OK, Check, Verdict
from tokenyard.tools.cli.app import COMMANDS
from tokenyard.tools.cli.group import make_app


@pytest.mark.processes
def test_all_is_well_here() -> None:
    found = list(conformance.run(2))
    assert [one.check for one in found] == conformance.checks(2)
    assert [(one.state, one.detail) for one in found] == [(OK, "")] * 8


@pytest.mark.parametrize("mode", [NORMAL, LOW_LATENCY])
def test_one_wrong_bit_is_found(mode: str) -> None:
    check = Check("direct", mode, 2)
    outs = run_virtual(conformance.job, 2, check, timeout=scaled(200)).results
    conformance.compare(check, outs)
    x = outs[0][0]["combined"]
    x.view(torch.int16)[0, 0] ^= 1
    with pytest.raises(
        AssertionError, match=r"rank 0, routing uniform, bfloat16: combined\[0, 0\]"
    ):
        conformance.compare(check, outs)


def test_a_rank_that_fails_ends_no_other_check(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Any] = []

    class Ranks:
        """Stands for processes: the first check's ranks die, the second's transport is refused."""

        def __init__(self, num_ranks: int, timeout: float) -> None:
            pools.append(self)
            self.closed = False

        def run(self, job: Any, check: Check) -> list[Any]:
            if check.transport == "direct":
                raise RankFailed("rank 1 of 2: Traceback\n  somewhere\nValueError: it broke\n")
            return ["the kernel set has no signals"] * 2

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(conformance, "Processes", Ranks)
    found = list(conformance.run(2))
    assert [one.state for one in found] == [FAILED] * 2 + [NOT_HERE] * 6
    assert found[0].detail == "ValueError: it broke"
    assert found[-1].detail == "the kernel set has no signals"
    assert len(pools) == 3
    assert all(one.closed for one in pools)


@pytest.mark.parametrize("wrong", [False, True])
def test_the_command(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    def run(num_ranks: int) -> Iterator[Verdict]:
        for check in conformance.checks(num_ranks):
            is_bad = wrong and check.transport == "ring"
            yield Verdict(check, FAILED if is_bad else OK, "it differs" * is_bad, 8, 0.5)

    monkeypatch.setattr(conformance, "run", run)
    app, runner = make_app(COMMANDS), CliRunner()
    said = runner.invoke(app, ["selftest", "--ranks", "3"])
    assert said.exit_code == wrong
    assert said.stderr.startswith("1 of 8: direct, normal, ")
    lines = [line.split() for line in said.stdout.splitlines()]
    assert ["ok", "direct", "normal", "8", "0.5", "s"] in lines
    assert (["failed", "ring", "normal", "8", "0.5", "s", "it", "differs"] in lines) == wrong
    told = json.loads(runner.invoke(app, ["selftest", "--json"]).stdout)
    assert told["ok"] is not wrong
    assert len(told["checks"]) == 8


@pytest.mark.parametrize("ranks", ["0", "65"])
def test_too_many_ranks(ranks: str) -> None:
    said = CliRunner().invoke(make_app(COMMANDS), ["selftest", "--ranks", ranks])
    assert said.exit_code == 2
    assert said.stderr.startswith(f"tokenyard: num_ranks is {ranks}, want ")
    assert said.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.processes
def test_what_cannot_run_here_is_no_failure() -> None:
    before = f"import sys\n{SECCOMP}\nrefuse({MEMFD_CREATE}, {MAY_NOT})\n"
    code = before + "from tokenyard.tools.cli.app import main; main(['selftest', '--json'])"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    states = {one["transport"]: one for one in json.loads(done.stdout)["checks"]}
    assert states["collective"]["state"] == OK
    assert states["direct"]["state"] == NOT_HERE
    assert "Operation not permitted" in states["direct"]["detail"]
