"""Protocols in shared memory, checked by spin: as they are, and with one rule at a time broken."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cases.clock import scaled
from tests.cases.lanes import at_night

HERE = Path(__file__).parent
RING, EXCHANGE = HERE / "ring.pml", HERE / "exchange.pml"

pytestmark = pytest.mark.skipif(
    not (shutil.which("spin") and shutil.which("gcc")),
    reason="spin and gcc are needed (Debian's packages have these names)",
)

# Models change with tests/models alone: the gate sees that one of each holds.
SLOW = pytest.mark.slow

# COMBINES, WIDE and SILENT have a bit for each call, the first call's lowest: see the model.
TWO_THREADS = "-DC=2 -DTHREADS=2"
COMBINE_OF_THREE = "-DR=3 -DCELLS=1 -DCALLS=1 -DCOMBINES=1 -DWIDE=0"


def check(directory: Path, options: str, model: Path = RING) -> str:
    """What the checker says of a model with these options, having seen all of its states."""

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=scaled(100), check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("spin", *options.split(), "-a", str(model))
    run("gcc", "-O1", "-w", "-DSAFETY", "-DMEMLIM=2000", "-o", "pan", "pan.c")
    return run("./pan", "-m100000")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("", id="dispatch, dispatch, combine"),
        pytest.param("-DCOMBINES=5 -DWIDE=5", id="combine, dispatch, combine", marks=SLOW),
        pytest.param("-DC=2", id="two channels", marks=SLOW),
        pytest.param(TWO_THREADS, id="two threads", marks=SLOW),
        pytest.param(
            "-DC=2 -DSILENT=2 -DCOMBINES=0", id="a rank that is two calls ahead", marks=SLOW
        ),
        pytest.param(COMBINE_OF_THREE, id="three ranks, one slot", marks=SLOW),
    ],
)
def test_the_ring_holds(tmp_path: Path, options: str) -> None:
    assert_holds(check(tmp_path, options))


def assert_holds(said: str) -> None:
    assert "errors: 0" in said
    assert "Search not completed" not in said
    assert "too small" not in said


@pytest.mark.parametrize(
    "options, error",
    [
        pytest.param("-DNO_DRAIN", "assertion violated", id="another geometry too early"),
        pytest.param("-DDRAIN_ONE -DC=2", "assertion violated", id="another call too early"),
        pytest.param(f"-DHEAD_FIRST {TWO_THREADS}", "assertion violated", id="head before count"),
        pytest.param(f"-DCOUNT_FIRST {TWO_THREADS}", "assertion violated", id="count before tail"),
        pytest.param("-DTAIL_FIRST", "assertion violated", id="tail before record"),
        pytest.param("-DBLOCK", "invalid end state", id="dispatch that blocks"),
        pytest.param(f"-DBLOCK {COMBINE_OF_THREE}", "invalid end state", id="combine that blocks"),
    ],
)
@pytest.mark.slow
def test_a_broken_rule_of_the_ring_is_caught(tmp_path: Path, options: str, error: str) -> None:
    said = check(tmp_path, options)
    assert f"pan:1: {error}" in said
    assert "errors: 1" in said


# KINDS has a digit for each call, the first call's lowest: see the model.
CALLS_OF_EXCHANGES = {
    "dispatch, failure, combine with a copy, dispatch": "-DKINDS=230",
    "two failures, dispatch, combine": "-DKINDS=1033",
    "three dispatches, combine": "-DKINDS=1000",
    "combines of both kinds in turn": "-DKINDS=2121",
    "failure after each call": "-DKINDS=313230 -DCALLS=6",
}


@pytest.mark.parametrize("calls", at_night(CALLS_OF_EXCHANGES, gate=("failure after each call",)))
def test_exchanges_hold(tmp_path: Path, calls: str) -> None:
    assert_holds(check(tmp_path, CALLS_OF_EXCHANGES[calls], EXCHANGE))


BROKEN_EXCHANGES = {
    "signal before rows are visible": ("-DNO_FENCE", "assertion violated"),
    "rows read before their signal": ("-DNO_ACQUIRE", "assertion violated"),
    "signal before the message": ("-DBOX_LATER", "assertion violated"),
    "one box for all messages": ("-DONE_BOX", "assertion violated"),
    "a signal that must equal the epoch": ("-DEQUAL", "invalid end state"),
    "memory of a result that is held": ("-DSAME_BLOCK -DKINDS=0", "assertion violated"),
    "ready without asking the other": ("-DOWN_READY -DKINDS=2222", "invalid end state"),
    "rows read before they are copied": ("-DNO_COPY_WAIT", "assertion violated"),
    "read before reading": ("-DREAD_FIRST", "assertion violated"),
    "back before others have read": ("-DNO_READ_WAIT", "assertion violated"),
    "a message sent twice": ("-DPOST_TWICE", "invalid end state"),
}


@pytest.mark.slow
@pytest.mark.parametrize("options, error", BROKEN_EXCHANGES.values(), ids=BROKEN_EXCHANGES.keys())
def test_a_broken_rule_of_exchanges_is_caught(tmp_path: Path, options: str, error: str) -> None:
    said = check(tmp_path, options, EXCHANGE)
    assert f"pan:1: {error}" in said
    assert "errors: 1" in said
