"""Rows that travel with the words of the agreement: the same bits, whoever has too many of them."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tests.cases.conformance import CASES, case_of, check
from tests.cases.exchange import Case, open_buffer, rounds
from tests.cases.inside import transport_of
from tests.cases.lanes import at_night, random_cases
from tests.cases.peers import exchange
from tests.cases.processes import Pools
from tokenyard import spec
from tokenyard.kernels import numba as kernels
from tokenyard.runtime.memory import as_bytes
from tokenyard.shm.mailbox import Mailbox
from tokenyard.shm.node import SharedNode
from tokenyard.testing import Processes, assert_same, numbered_tokens, routing, run_virtual
from tokenyard.transports.hierarchical import enclosed
from tokenyard.transports.hierarchical.route import pack_marks
from tokenyard.transports.hierarchical.staging import Staging
from tokenyard.wire import int64s
from tokenyard.wire import nodes_table as at
from tokenyard.wire.verdicts import DONE, STRAY

SHAPES = [(1, 1), (2, 2), (3, 2, 1)]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not change which way a combine goes."""
    monkeypatch.setattr(Staging, "soon", 100.0)


def enclosed_calls(buffer: tokenyard.Buffer) -> Counter[str]:
    """How many calls of this rank ended with the agreement's round."""
    return +Counter(
        {stage: n["compiled"] + n["enclosed"] for stage, n in buffer.stats()["ways"].items()}
    )


def job(group: Any, case: Case) -> tuple[dict[str, Any], Counter[str]]:
    with open_buffer(group, case) as buffer:
        return rounds(buffer, case), enclosed_calls(buffer)


def check_calls(case: Case, wanted: dict[str, int]) -> None:
    """Ranks got what `spec` says, in so many calls of each stage that enclosed their rows."""
    outs, calls = zip(*run_virtual(job, case.num_ranks, case).results)
    check(case, list(outs))
    assert list(calls) == [wanted] * case.num_ranks


def on_nodes(name: str, sizes: tuple[int, ...]) -> Case:
    case = case_of(name, sum(sizes))
    return replace(case, ranks_per_node=sizes, transport="hierarchical", kernels="numba")


@pytest.mark.parametrize("sizes", at_night(SHAPES, gate=[(3, 2, 1)]), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_all_rows_are_enclosed(
    name: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls but the first, in which ranks hear that there is something to enclose."""
    monkeypatch.setattr(enclosed, "_LEAST", 1 << 20)
    check_calls(on_nodes(name, sizes), {"dispatch": 1, "cached dispatch": 1, "combine": 4})


@pytest.mark.parametrize("sizes", at_night(SHAPES, gate=[(2, 2)]), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_no_rows_are_enclosed(
    name: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enclosed, "MOST_ENCLOSED", 0)
    monkeypatch.setattr(enclosed, "_MOST_STAGED", 0)
    check_calls(on_nodes(name, sizes), {})


def test_neighbours_that_do_not_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No combine encloses its rows, though all would: they are offered after that."""
    monkeypatch.setattr(enclosed, "_LEAST", 1 << 20)
    monkeypatch.setattr(Mailbox, "meet_soon", lambda *_: False)
    check_calls(on_nodes("plain", (2, 2)), {"dispatch": 1, "cached dispatch": 1})


def test_a_node_without_memory_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise tokenyard.SharedMemoryError("nothing is left")

    monkeypatch.setattr(SharedNode, "share_arrays", none)
    check_calls(on_nodes("plain", (2, 2)), {})


class Drawn:
    """A random program: the tokens of each rank in each call, around the bound or far from it."""

    def __init__(self, seed: int, num_ranks: int, width: int, bound: int) -> None:
        draw = random.Random(seed)
        fits = bound // width
        around = [0, 1, fits - 1, fits, fits + 1, 2 * fits]
        self.sizes, self.steps = [], []
        for number in range(6):
            same = draw.choice([*around, None])
            self.sizes.append(
                [draw.choice(around) if same is None else same for _ in range(num_ranks)]
            )
            before = draw.randrange(number + 1)
            self.steps += [("dispatch", number), (draw.choice(["again", "combine"]), before)]
        self.late = draw.randrange(num_ranks)  # whose combines wait for an event


def run_drawn(
    group: Any, seed: int, sizes: tuple[int, ...], bound: int
) -> tuple[list[Any], Counter[str]]:
    rank, num_ranks = group.rank(), group.size()
    drawn, out = Drawn(seed, num_ranks, 100, bound), []
    with tokenyard.Buffer(
        group, transport="hierarchical", ranks_per_node=list(sizes), timeout=scaled(60)
    ) as buffer:
        made: list[Any] = []
        for kind, number in drawn.steps:
            x, topk_idx, weights = given(drawn, number, rank)
            if kind == "dispatch":
                later = (seed + number + rank) % 3 == 0  # others make a compiled call
                got: Any = buffer.dispatch(
                    x, topk_idx=topk_idx, topk_weights=weights, num_experts=8, async_finish=later
                )
                if later:
                    got.event.current_stream_wait()
                made.append(got)
                out.append(got.recv_x)
            elif kind == "again":
                out.append(buffer.dispatch(x, handle=made[number].handle).recv_x)
            else:
                late = drawn.late == rank
                sums = buffer.combine(
                    made[number].recv_x,
                    made[number].handle,
                    previous_event=buffer.capture() if late else None,
                    async_finish=late,
                )
                if late:
                    sums.event.current_stream_wait()
                out.append(sums.x)
        return out, enclosed_calls(buffer)


def given(drawn: Drawn, number: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = drawn.sizes[number][rank]
    x = numbered_tokens(num_tokens, 32, first=1000 * number + 100 * rank)  # 100 bytes a record
    return x, *routing("holes", num_tokens, 2, 8, seed=10 * number + rank)


def expected(seed: int, sizes: tuple[int, ...], bound: int) -> list[list[Tensor]]:
    num_ranks = sum(sizes)
    drawn = Drawn(seed, num_ranks, 100, bound)
    nodes = tuple(node for node, size in enumerate(sizes) for _ in range(size))
    world = replace(spec.World.even(8, num_ranks), node_of_rank=nodes)
    out: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    for kind, number in drawn.steps:
        every = [given(drawn, number, rank) for rank in range(num_ranks)]
        layouts = [spec.layout(one[1], world) for one in every]
        rows = [one.x for one in spec.dispatch([one[0] for one in every], layouts, world)]
        results = spec.combine(rows, layouts, world) if kind == "combine" else rows
        for mine, result in zip(out, results):
            mine.append(result)
    return out


@pytest.mark.parametrize("sizes", at_night(SHAPES, gate=[(3, 2, 1)]), ids=str)
def test_ranks_fit_and_do_not_fit_in_turn(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 1000
    monkeypatch.setattr(enclosed, "MOST_ENCLOSED", bound)
    monkeypatch.setattr(enclosed, "_MOST_STAGED", 4 * bound // 64 * 64)
    monkeypatch.setattr(enclosed, "_LEAST", 256)
    calls = Counter[str]()
    for seed in range(random_cases(8)):
        run = run_virtual(run_drawn, sum(sizes), seed, sizes, bound, timeout=scaled(120))
        for rank, (got, want) in enumerate(zip(run.results, expected(seed, sizes, bound))):
            assert_same(got[0], want, f"seed {seed}, rank {rank}")
            calls += got[1]
    assert calls["dispatch"] + calls["cached dispatch"] > random_cases(10)
    assert calls["combine"] > random_cases(5)


def drawn_on_processes(group: Any, seeds: range, sizes: tuple[int, ...], bound: int) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enclosed, "MOST_ENCLOSED", bound)
        patch.setattr(enclosed, "_MOST_STAGED", 4 * bound // 64 * 64)
        patch.setattr(enclosed, "_LEAST", 256)
        return [run_drawn(group, seed, sizes, bound)[0] for seed in seeds]


@pytest.mark.processes
@pytest.mark.parametrize("sizes", at_night([(1, 1), (2, 2), (3, 1)], gate=[(3, 1)]), ids=str)
def test_processes_fit_and_do_not_fit_in_turn(sizes: tuple[int, ...], processes: Pools) -> None:
    seeds = range(100, 100 + random_cases(8))
    answers = processes(sum(sizes)).run(drawn_on_processes, seeds, sizes, 1000)
    for seed, *results in zip(seeds, *answers):
        for rank, (got, want) in enumerate(zip(results, expected(seed, sizes, 1000))):
            assert_same(got, want, f"seed {seed}, rank {rank}")


def table_of(
    marks_TR: Tensor, ranks: Tensor, columns: list[Tensor], parcel: Tensor, kept: list[Any]
) -> Any:
    """A table of steps whose only other node has these ranks, and whose staging is the parcel."""
    table = int64s.new(at.TABLE_WORDS)
    firsts, parcels = np.array([0, len(ranks)]), np.array([parcel.data_ptr()] * 2)
    tally = np.zeros((at.FACTS + len(ranks), 2), np.int64)
    tally[at.CAME_TOKENS] = len(marks_TR)
    bits = np.zeros(2 * len(marks_TR) * -(-len(ranks) // 8), np.uint8)
    table[at.SIZE], table[at.NUM_RANKS] = marks_TR.shape[1], len(ranks)
    table[at.RANKS], table[at.FIRSTS] = ranks.data_ptr(), firsts.ctypes.data
    table[at.STAGED] = table[at.PARCELS] = parcels.ctypes.data
    table[at.NUM_TOKENS], table[at.MARKS] = len(marks_TR), marks_TR.data_ptr()
    table[at.TALLY], table[at.BITS] = tally.ctypes.data, bits.ctypes.data
    table[at.NUM_COLUMNS] = len(columns)
    for place, column in enumerate(columns):
        table[at.SOURCES + place] = column.data_ptr()
        table[at.STRIDES + place], table[at.WIDTHS + place] = column.stride(0), column.shape[1]
    kept += [firsts, parcels, tally, bits]
    return table, tally, bits


@pytest.mark.parametrize("num_ranks", [1, 3, 8, 11])
def test_parcels(num_ranks: int) -> None:
    """A parcel holds marks and records; whoever takes rows from it gets those of one rank."""
    generator = torch.Generator().manual_seed(num_ranks)
    others, tokens = 4, 9
    kept: list[Any] = []
    marks = torch.rand(tokens, num_ranks + others, generator=generator) < 0.3
    ranks = torch.randperm(num_ranks + others, generator=generator)[:num_ranks].sort().values
    columns = [
        torch.randint(0, 255, (tokens, width), dtype=torch.uint8, generator=generator)
        for width in (5, 1, 17)
    ]
    parcel = torch.full((4096,), 255, dtype=torch.uint8)
    table, tally, bits_kept = table_of(marks, ranks, columns, parcel, kept)
    steps = kernels.nodes_rows(int64s.address(table))
    assert steps.fill_own() == DONE
    mine = marks[:, ranks]
    bits = pack_marks(marks.numpy(), ranks.tolist())
    assert_same(parcel[: len(bits)], torch.from_numpy(bits))
    records = torch.cat([as_bytes(column) for column in columns], 1)[mine.any(1)]
    begin = -(-len(bits) // 64) * 64
    assert_same(parcel[begin : begin + records.numel()].view(records.shape), records)
    assert bool((parcel[begin + records.numel() :] == 255).all())
    table[at.SIZE] = 2  # both of which have left this parcel
    for place in range(num_ranks):
        want = [column[mine[:, place]] for column in columns]
        got = [torch.zeros_like(column).repeat(2, 1) for column in want]
        table[at.PLACE] = place
        for column, one in enumerate(got):
            table[at.TARGETS + column] = one.data_ptr()
        counts = tally[at.CAME_ROWS]
        counts[:] = len(want[0])
        assert steps.take() == DONE
        assert_same(got, [column.repeat(2, 1) for column in want])
        assert_same(torch.from_numpy(bits_kept), torch.from_numpy(bits).repeat(2))
        assert tally[at.CAME_RECORDS].tolist() == [len(records)] * 2
        assert tally[at.CAME_BITS].tolist() == [0, len(bits)]
        assert_same(torch.from_numpy(tally[at.FACTS :, 1]), mine.sum(0))
        for wrong in (-1, 1):
            counts[1] += wrong
            assert steps.take() == (STRAY << 32 | 1)
            counts[1] -= wrong


def late_message(group: Any) -> bool:
    """After PeerTimeout gloo may still receive: whether it does so into memory of its own."""
    buffer = tokenyard.Buffer(
        group, transport="hierarchical", ranks_per_node=1, timeout=scaled(1.0)
    )
    if group.rank() == 1:
        time.sleep(scaled(2.5))
        with suppress(tokenyard.PeerError):
            exchange(buffer)
        return True
    received = transport_of(buffer).enclosures.steps.staging.received[0][0]
    owner = weakref.ref(transport_of(buffer).enclosures.steps.staging._own)
    with pytest.raises(tokenyard.PeerTimeout):
        exchange(buffer)
    del buffer
    gc.collect()
    is_held = owner() is not None  # as long as the tensor that gloo was given
    received.sum()
    del received
    return is_held


@pytest.mark.processes
def test_late_messages_find_the_memory_that_they_were_meant_for() -> None:
    with Processes(2, timeout=scaled(60)) as ranks:
        assert ranks.run(late_message, may_die=True) == [True, True]
