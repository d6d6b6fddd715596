"""Buffers over MPI, under Open MPI's mpiexec and MPICH's, without torch.distributed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard
from tests.cases import by_expert, exchange, late_opening, mpi, over_mpi, told
from tests.cases.bad_input import CASES as BAD
from tests.cases.bad_input import NUM_RANKS as NUM_BAD
from tests.cases.buffers_at_once import two_buffers
from tests.cases.clock import scaled
from tests.cases.conformance import CASES, case_of, check
from tests.cases.exchange import Case
from tests.cases.lanes import at_night
from tests.cases.shorter_messages import check as check_shorter
from tests.cases.shorter_messages import shorter
from tokenyard.comm import connect
from tokenyard.comm.base import Exchange
from tokenyard.testing import conformance

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
TRANSPORTS = ("collective", "direct", "hierarchical")
NAMES = [name for name in CASES if CASES[name].get("kernels") != "reference"]
FEW = ("plain", "no-tokens-on-some")
BOTH = pytest.mark.parametrize("library", mpi.LIBRARIES)
ONE = pytest.mark.parametrize("library", at_night(mpi.LIBRARIES, gate=("openmpi",)))
ULFM = ("--with-ft", "ulfm")


def present(library: str) -> str:
    if why := mpi.why_not(library):
        pytest.skip(why)
    return library


def cases(num_ranks: int, names: Sequence[str]) -> list[Case]:
    """These cases on every transport: `hierarchical` on nodes of two ranks, if there are more."""
    found = [
        replace(case_of(name, num_ranks), transport=transport)
        for transport in TRANSPORTS
        for name in names
    ]
    return [
        replace(case, ranks_per_node=min(2, -(-num_ranks // 2)))
        if case.transport == "hierarchical" and case.ranks_per_node is None
        else case
        for case in found
    ]


EVERY = [f"{library}-{num_ranks}" for library in mpi.LIBRARIES for num_ranks in (1, 2, 3, 4, 8)]


@pytest.mark.parametrize("ranks", at_night(EVERY, gate=("openmpi-4", "mpich-3")))
def test_rows_are_those_of_the_specification(ranks: str, request: pytest.FixtureRequest) -> None:
    """As the conformance cases over gloo: rows by source and by expert, and both modes."""
    library, num_ranks = ranks.split("-")[0], int(ranks.split("-")[1])
    is_night = request.node.get_closest_marker("slow") is not None
    names = NAMES if is_night else FEW
    rows = cases(num_ranks, names)
    experts = [case for case in rows if not case.worst and case.num_biases == 0]
    both_modes = [one for one in conformance.checks(num_ranks) if one.transport in TRANSPORTS]
    jobs: list[mpi.Job] = [(exchange.job, case) for case in rows]
    jobs += [(by_expert.job, case) for case in experts]
    jobs += [(conformance.job, one) for one in both_modes]
    done = iter(mpi.run(present(library), num_ranks, jobs, limit=500))
    for case in rows:
        check(case, next(done))
    for case in experts:
        by_expert.check(case, next(done))
    for one in both_modes:
        conformance.compare(one, next(done))


@pytest.mark.slow
@BOTH
def test_nobody_gets_the_rows_of_another(library: str) -> None:
    """Rows that are fewer than there is room for, and Buffers that are called at the same time."""
    jobs = (shorter,), (two_buffers, "collective"), (two_buffers, "direct"), (is_without_torch,)
    parts, *buffers, without = mpi.run(present(library), 3, jobs)
    check_shorter(parts)
    assert buffers == [["ok"] * 3] * 2
    assert without == [True] * 3


def is_without_torch(group: Any) -> bool:
    return not dist.is_initialized() and type(group).__name__ == "MpiGroup"


@ONE
def test_openings_and_tags(library: str) -> None:
    late = [(over_mpi.late, is_first) for is_first in (True, False)]
    jobs = [over_mpi.two_openings, over_mpi.a_message_that_waits, over_mpi.more_buffers_than_tags]
    sums, waits, many, *told = mpi.run(present(library), 2, [*((job,) for job in jobs), *late])
    assert sums == [[2.0, 4.0]] * 2
    assert waits == [[0.0, 1.0, 7.0], [0.0, 1.0, 0.0]]
    for rank, (last, num_duplicates, said) in enumerate(many):
        assert (last, num_duplicates) == ([0.0, 1.0, 2.0, 3.0, 4.0], 3)
        assert said == f"ranks {rank} and {1 - rank} share 8 parts of a group, want smaller nodes"
    for by_rank in told:
        late_opening.check(by_rank)


@ONE
def test_one_thread_at_a_time_is_in_mpi_where_it_wants_that(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", "serialized")
    (told,) = mpi.run(present(library), 2, [(over_mpi.threads_in_mpi,)])
    assert told == [(True, 1)] * 2


SAMPLE = [name for place, name in enumerate(BAD) if place % 12 == 0]


@pytest.mark.parametrize("names", at_night([tuple(BAD), tuple(SAMPLE)], gate=(tuple(SAMPLE),)))
@ONE
def test_all_ranks_are_told_of_bad_input(library: str, names: tuple[str, ...]) -> None:
    outcomes = mpi.run(present(library), NUM_BAD, [(told.job, name) for name in names], limit=500)
    for name, by_rank in zip(names, outcomes):
        for rank, outcome in enumerate(by_rank):
            told.check_told(BAD[name], rank, outcome)
        told.check_works_on(by_rank)


def wait_for_a_late_rank(group: Any) -> float:
    """Seconds of a core that a rank takes while it waits a second for rank 0."""
    with tokenyard.Buffer(group, transport="collective") as buffer:
        for _ in range(2):
            buffer.all_gather(torch.ones(3, 5))
        begin = time.process_time()
        if group.rank() == 0:
            time.sleep(scaled(1.0))
        buffer.all_gather(torch.ones(3, 5))
        return time.process_time() - begin


@ONE
def test_a_rank_that_waits_gives_its_core_away(library: str) -> None:
    (taken,) = mpi.run(present(library), 3, [(wait_for_a_late_rank,)])
    assert max(taken[1:]) < 0.3 * scaled(1.0), taken


def large_rows(group: Any, num_bytes: int) -> list[int]:
    """Rank 0 sends so many bytes to rank 1: the first, the last, and one of each GiB."""
    whole = connect(group, 60)
    size = whole.size
    sent, come = [0] * size, [0] * size
    if whole.rank == 0:
        sent[1] = num_bytes
    elif whole.rank == 1:
        come[0] = num_bytes
    rows = torch.arange(num_bytes // 8 if whole.rank == 0 else 0).view(torch.uint8)[:, None]
    out = torch.zeros(sum(come), 1, dtype=torch.uint8)
    whole.all_to_all(Exchange(out, rows, come, sent, "test"))
    numbers = out.view(-1).view(torch.int64)
    whole.close()
    return numbers[:: 1 << 27].tolist() + numbers[-1:].tolist()


@pytest.mark.slow
@BOTH
def test_more_than_two_gigabytes_at_once(library: str) -> None:
    num_bytes = (2 << 30) + (1 << 29) + 8
    ((_, got),) = mpi.run(present(library), 2, [(large_rows, num_bytes)])
    assert got == [*range(0, num_bytes // 8, 1 << 27), num_bytes // 8 - 1]


def live_or_die(group: Any, victims: Sequence[int], turn: int, transport: str) -> dict[str, Any]:
    """Exchange until the victims kill themselves; then go on without them, in a new Buffer."""
    rank, nodes = group.rank(), 2 if transport == "hierarchical" else None
    told: dict[str, Any] = {}
    begin = time.monotonic()
    try:
        with tokenyard.Buffer(
            comm=group.comm, transport=transport, ranks_per_node=nodes, timeout=scaled(20)
        ) as buffer:
            for number in range(turn + 3):
                if number == turn and rank in victims:
                    os.kill(os.getpid(), signal.SIGKILL)
                begin = time.monotonic()
                x = torch.full((4, 8), float(rank))
                idx = torch.arange(4)[:, None] % group.size()
                got: Any = buffer.dispatch(
                    x, topk_idx=idx, topk_weights=torch.ones(4, 1), num_experts=group.size()
                )
                buffer.combine(got.recv_x, got.handle)
    except tokenyard.PeerError as error:
        told = {"kind": type(error).__name__, "ranks": error.ranks, "text": str(error)}
        told["seconds"] = time.monotonic() - begin
    group.comm.Revoke()
    fewer = group.comm.Shrink()
    with tokenyard.Buffer(comm=fewer, timeout=scaled(20)) as buffer:
        mine = torch.tensor([[rank]])
        told["living"] = buffer.all_gather(mine)[0].flatten().tolist()
    return told


@pytest.mark.faults
@pytest.mark.parametrize("seed", at_night(range(50), gate=(0,)))
def test_a_killed_rank_is_named_and_the_others_go_on(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks = draw.randint(3, 6)
    victims = tuple(sorted(draw.sample(range(num_ranks), draw.randint(1, 2))))
    transport = draw.choice(TRANSPORTS) if num_ranks % 2 == 0 else "collective"
    job = live_or_die, victims, draw.randint(0, 5), transport
    (told,) = mpi.run(present("openmpi"), num_ranks, [job], options=ULFM, gone=victims)
    living = [rank for rank in range(num_ranks) if rank not in victims]
    for rank in living:
        answer = told[rank]
        assert answer["kind"] == "PeerDied", answer
        assert set(answer["ranks"]) <= set(victims), answer
        assert answer["seconds"] < scaled(1.0), answer
        assert answer["living"] == living, answer


LAUNCHED = """
import torch, tokenyard
with tokenyard.Buffer() as buffer:
    got = buffer.all_gather(torch.tensor([[buffer.rank]]))[0].flatten().tolist()
    print(f"{got} {buffer.stats()['transport']}", flush=True)
"""


@BOTH
def test_a_script_under_mpiexec_gets_all_ranks(library: str) -> None:
    done = mpi.mpiexec(present(library), 2, "-c", LAUNCHED)
    assert done.stdout.count("[0, 1] direct") == 2, done.stdout + done.stderr


@pytest.mark.slow
def test_ranks_of_another_mpi_are_not_taken_for_groups_of_one() -> None:
    """MPICH's mpiexec, and Open MPI in the ranks."""
    present("openmpi")
    python = str(mpi.MPI / "openmpi" / "bin" / "python")
    done = mpi.mpiexec(present("mpich"), 2, "-c", LAUNCHED, program=python)
    assert done.returncode != 0
    assert "mpiexec has started 2 processes (PMI_SIZE) and mpi4py's MPI (Open MPI" in done.stderr


@pytest.mark.slow
@BOTH
def test_selftest(library: str) -> None:
    words = "-m", "tokenyard", "selftest", "--engine", "mpi", "--json"
    done = mpi.mpiexec(present(library), 2, *words)
    assert done.returncode == 0, done.stderr
    told, _ = json.JSONDecoder().raw_decode(done.stdout)  # Open MPI resets the terminal's colours
    assert (told["ranks"], told["ok"]) == (2, True)
    assert {one["state"] for one in told["checks"]} == {"ok"}
