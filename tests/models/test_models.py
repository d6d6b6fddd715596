"""Protocols in shared memory, checked by spin: as they are, and with one rule at a time broken."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cases.clock import scaled
from tests.cases.lanes import at_night

HERE = Path(__file__).parent
RING, CALL, SLOTS = HERE / "ring.pml", HERE / "call.pml", HERE / "slots.pml"

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
    # Ranks of slots have many words, most of them alike in many states.
    small = ["-DCOLLAPSE"] if model is SLOTS else []
    run("gcc", "-O1", "-w", "-DSAFETY", "-DMEMLIM=2000", *small, "-o", "pan", "pan.c")
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
CALLS = {
    "by source, failure, asynchronous combine, by expert": "-DKINDS=4360",
    "by source, blocks that are too small": "-DKINDS=10410 -DCALLS=5",
    "six by expert": "-DKINDS=444444 -DCALLS=6",
    "by expert without tokens first": "-DKINDS=4455",
    "asynchronous combines in turn": "-DKINDS=333334 -DCALLS=6",
    "combines of all kinds": "-DKINDS=243424 -DCALLS=6",
    "two failures, by source, combine": "-DKINDS=2066",
    "failure after each call": "-DKINDS=646063 -DCALLS=6",
    "failure while a thread reads": "-DKINDS=463644 -DCALLS=6",
}


@pytest.mark.parametrize("calls", at_night(CALLS, gate=("failure while a thread reads",)))
def test_calls_hold(tmp_path: Path, calls: str) -> None:
    assert_holds(check(tmp_path, CALLS[calls], CALL))


FALSE, STUCK = "assertion violated", "invalid end state"
FOUR_BY_EXPERT = "-DKINDS=4444"

BROKEN_CALLS = {
    "signal before the message": ("-DBOX_LATER", FALSE),
    "one box for all messages": ("-DONE_BOX", FALSE),
    "a signal that must equal the epoch": ("-DEQUAL", STUCK),
    "a message sent twice": ("-DPOST_TWICE", STUCK),
    "signal before rows are visible": ("-DNO_FENCE", FALSE),
    "rows read before their signal": ("-DNO_ACQUIRE", FALSE),
    "memory of a result that is held": ("-DSAME_BLOCK -DKINDS=0", FALSE),
    "only who lacks memory offers again": ("-DGROW_ALONE -DKINDS=11", FALSE),
    "rows for a block that is too small": ("-DOLD_BLOCK -DKINDS=11", FALSE),
    "a block written one call too early": (f"-DONE_BLOCK {FOUR_BY_EXPERT}", FALSE),
    "a turn that no message goes with": (f"-DTURN_TWICE {FOUR_BY_EXPERT}", FALSE),
    "gone before a block was read": ("-DNO_AWAITS -DKINDS=4 -DCALLS=1", FALSE),
    "a block known that not all have mapped": ("-DKNOWN_UNREAD -DKINDS=455 -DCALLS=3", FALSE),
    "a message before the block is filled": (f"-DPOST_FIRST {FOUR_BY_EXPERT}", FALSE),
    "a message before the block is visible": (f"-DBLOCK_FENCE {FOUR_BY_EXPERT}", FALSE),
    "a block read before its message": (f"-DREAD_UNPOSTED {FOUR_BY_EXPERT}", FALSE),
    "a message before all blocks are read": ("-DPOST_AHEAD -DKINDS=44444 -DCALLS=5", FALSE),
    "nobody waits for who reads later": ("-DNO_LATER -DKINDS=46344 -DCALLS=5", FALSE),
    "read before reading, of a block": ("-DREAD_FIRST -DKINDS=4 -DCALLS=1", FALSE),
    "read before reading, where rows lie": ("-DREAD_FIRST -DKINDS=2222", FALSE),
    "back before others have read": ("-DNO_READ_WAIT -DKINDS=2222", FALSE),
    "ready without asking the other": ("-DOWN_READY -DKINDS=3333", FALSE),
    "rows read before they are copied": ("-DNO_COPY_WAIT", FALSE),
}


@pytest.mark.slow
@pytest.mark.parametrize("options, error", BROKEN_CALLS.values(), ids=BROKEN_CALLS.keys())
def test_a_broken_rule_of_calls_is_caught(tmp_path: Path, options: str, error: str) -> None:
    said = check(tmp_path, options, CALL)
    assert f"pan:1: {error}" in said
    assert "errors: 1" in said


# HOOKS, FAILS, GROWS and MASKS have a bit for each rank that may do so: see the model.
SLOT_CALLS = {
    "hooks of one rank": "-DHOOKS=2",
    "hooks of both ranks": "-DHOOKS=3",
    "hooks of both ranks, and a meeting": "-DHOOKS=3 -DMEET=2 -DPATIENT",
    "hooks, failures": "-DHOOKS=2 -DFAILS=3",
    "hooks of the rank that fails": "-DHOOKS=1 -DFAILS=1 -DCALLS=6",
    "hooks of both ranks, failures": "-DHOOKS=3 -DFAILS=1",
    "hooks, new blocks": "-DHOOKS=2 -DGROWS=3 -DPATIENT",
    "hooks, new blocks, failures": "-DHOOKS=2 -DGROWS=1 -DFAILS=3",
    "three ranks, hooks of one": "-DR=3 -DCALLS=3 -DHOOKS=4",
    "masks": "-DMASKS=3",
    "masks, hooks": "-DMASKS=1 -DHOOKS=2 -DCALLS=5",
    "masks, hooks of the rank that masks": "-DMASKS=3 -DHOOKS=1",
    "masks, a rank that dies": "-DMASKS=1 -DDIES=1 -DHOOKS=1",
    "masks, hooks, new blocks": "-DMASKS=1 -DHOOKS=2 -DGROWS=1",
    "masks, hooks, failures": "-DMASKS=1 -DHOOKS=2 -DFAILS=1",
    "three ranks, one masks": "-DR=3 -DCALLS=3 -DMASKS=1",
    "three ranks, all mask, one dies": "-DR=3 -DCALLS=1 -DMASKS=7 -DDIES=1",
}


@pytest.mark.parametrize("calls", at_night(SLOT_CALLS, gate=("hooks of one rank",)))
def test_calls_in_slots_hold(tmp_path: Path, calls: str) -> None:
    assert_holds(check(tmp_path, SLOT_CALLS[calls], SLOTS))


BROKEN_SLOTS = {
    "one block for both places": ("-DONE_BLOCK -DHOOKS=2", FALSE),
    "a place used before it was received there": ("-DNO_SETTLE -DHOOKS=2", STUCK),
    "a block written before it was read": ("-DNO_READ_WAIT -DHOOKS=2", FALSE),
    "read before reading": ("-DREAD_FIRST -DHOOKS=2", FALSE),
    "a dropped hook that is never read": ("-DSKIP_NO_READ -DHOOKS=2", STUCK),
    "a hook read twice": ("-DSKIP_TWICE -DHOOKS=2", STUCK),
    "a message before the block": ("-DPOST_FIRST", FALSE),
    "a message before the block is visible": ("-DNO_FENCE", FALSE),
    "a failed call that is never read": ("-DFAIL_NO_READ -DFAILS=1", STUCK),
    "a failed call that does not wait": ("-DFAIL_EARLY -DFAILS=1 -DHOOKS=2 -DCALLS=5", FALSE),
    "a failure that is heard and never read": ("-DHEAR_NO_READ -DFAILS=1", STUCK),
    "gone before memory was mapped": ("-DNO_AWAITS -DCALLS=2", FALSE),
    "waiting for who receives later": ("-DAWAIT_LATER -DHOOKS=2 -DMEET=1", STUCK),
    "a block known that one maps later": ("-DKNOWN_LATER -DHOOKS=2", FALSE),
    "gone before a hook has read": ("-DNO_LEAVE_WAIT -DPATIENT -DHOOKS=2", FALSE),
    "gone with a hook that was dropped": ("-DLEAVE_OPEN -DPATIENT -DHOOKS=2 -DCALLS=2", FALSE),
    "a block given back before it was read": ("-DDROP_EARLY -DGROWS=1 -DHOOKS=2", FALSE),
    "flags that nobody looks at": ("-DNO_FLAG_LOOK -DMASKS=1", FALSE),
    "flags looked at before reading": ("-DLOOK_FIRST -DMASKS=1", FALSE),
    "a flag after the block": ("-DFLAG_LATE -DMASKS=1", FALSE),
    "a flag visible after the block": ("-DFLAG_NO_FENCE -DMASKS=1 -DHOOKS=1", FALSE),
    "waiting for who is masked": ("-DWAIT_MASKED -DMASKS=1 -DDIES=1", STUCK),
    "a message without a look at the flag": ("-DHEAR_NO_LOOK -DMASKS=1 -DCALLS=5", FALSE),
    "memory gone without a look at the flag": ("-DMAP_NO_LOOK -DMASKS=1 -DGROWS=1", FALSE),
}


@pytest.mark.slow
@pytest.mark.parametrize("options, error", BROKEN_SLOTS.values(), ids=BROKEN_SLOTS.keys())
def test_a_broken_rule_of_slots_is_caught(tmp_path: Path, options: str, error: str) -> None:
    said = check(tmp_path, options, SLOTS)
    assert f"pan:1: {error}" in said
    assert "errors: 1" in said
