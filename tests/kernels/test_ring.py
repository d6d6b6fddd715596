"""Rings: ranks as threads of this process, each with its own memory, against `spec`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cases.clock import scaled
from tokenyard import spec
from tokenyard.kernels import numba as kernels
from tokenyard.testing import assert_same
from tokenyard.types import Flow, Layout
from tokenyard.wire.rings import RingUse

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SECONDS = scaled(100)  # a call that takes longer hangs


@dataclass
class Machine:
    """Ranks that share memory, and what they dispatch: rank r has `marks[r].shape[0]` tokens."""

    marks: list[Tensor]  # [T, R] bool
    num_channels: int = 1
    slots: int = 4
    chunk: int = 3
    num_used: int = 10  # of the channels
    num_threads: int = 1
    nodes: tuple[int, ...] = ()
    widths: Sequence[Sequence[int]] = ((64,),)  # of each call's columns: all have so many slots
    rings: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.marks)
        self.nodes = self.nodes or (0,) * self.size
        self.routes = [kernels.route(marks) for marks in self.marks]
        ring_bytes = 64
        while any(kernels.ring_slots(ring_bytes, each) < self.slots for each in self.widths):
            ring_bytes += 64
        self.memory = [lines(self.num_channels * self.size * ring_bytes) for _ in range(self.size)]
        bases = np.array([memory.ctypes.data for memory in self.memory], np.int64)
        self.rings = [
            kernels.make_rings(rank, bases, self.nodes, ring_bytes, self.num_channels)
            for rank in range(self.size)
        ]

    def counts(self, rank: int) -> list[int]:
        return [route.send_counts[rank] for route in self.routes]

    def flow(self, rank: int) -> Flow:
        counts = tuple(self.counts(rank))
        tokens = np.array([marks.shape[0] for marks in self.marks], np.int64)
        return Flow(self.routes[rank], counts, sum(counts), tokens, None, None)

    def use(self) -> RingUse:
        return RingUse(self.slots, self.chunk, min(self.num_used, self.num_channels))

    def plan_dispatch(self, rank: int, columns: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        counts = self.counts(rank)
        outs = [torch.full((sum(counts), column.shape[1]), 0xEE).byte() for column in columns]
        flow = self.flow(rank)
        plan = kernels.plan_ring_dispatch(self.rings[rank], columns, outs, flow, self.use())
        return plan, outs

    def plan_combine(
        self, rank: int, x: Tensor, weights: Tensor | None, biases: Sequence[Tensor]
    ) -> tuple[Any, Tensor, Tensor | None]:
        num_tokens = [marks.shape[0] for marks in self.marks]
        sent = [route.send_token.split(list(route.send_counts))[rank] for route in self.routes]
        out = torch.full((num_tokens[rank], x.shape[1]), float("nan"), dtype=x.dtype)
        sums = None if weights is None else torch.full((num_tokens[rank], weights.shape[1]), -1.0)
        plan = kernels.plan_ring_combine(
            self.rings[rank],
            [x] if weights is None else [x, weights],
            [out] if sums is None else [out, sums],
            self.flow(rank),
            torch.cat(sent),
            biases,
            self.use(),
        )
        return plan, out, sums

    def dispatch(self, rank: int, columns: Sequence[Tensor]) -> list[Tensor]:
        plan, outs = self.plan_dispatch(rank, columns)
        self._drive(lambda *part: kernels.ring_dispatch(plan, *part))
        return outs

    def combine(
        self, rank: int, x: Tensor, weights: Tensor | None = None, biases: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor | None]:
        plan, *outs = self.plan_combine(rank, x, weights, biases)
        self._drive(lambda *part: kernels.ring_combine(plan, *part))
        return outs[0], outs[1]

    def _drive(self, kernel: Callable[[int, int, int], int]) -> None:
        """To the end, each thread of the rank its own channels."""
        cuts = [self.num_channels * i // self.num_threads for i in range(self.num_threads + 1)]
        deadline = time.monotonic() + SECONDS

        def part(i: int) -> None:
            while left := kernel(cuts[i], cuts[i + 1], 5):
                assert left > 0
                assert time.monotonic() < deadline, f"{left} rows left"
                os.sched_yield()

        together(part, self.num_threads)

    def spec(self) -> tuple[list[Layout], spec.World]:
        """An expert a rank."""
        world = spec.World(tuple(range(self.size)), self.nodes)
        return [Layout(m.sum(0).int(), None, m.sum(0).int(), m) for m in self.marks], world


def lines(num_bytes: int) -> np.ndarray:
    """Zeros that begin on a line's boundary."""
    memory = np.zeros(num_bytes + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:num_bytes]


def together(job: Callable[[int], object], count: int) -> None:
    """job(0) .. job(count - 1), each in a thread; the first error is raised here."""
    errors: list[BaseException] = []

    def body(i: int) -> None:
        try:
            job(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def marks(sizes: Sequence[int], density: float, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.rand(size, len(sizes), generator=random) < density for size in sizes]


def columns_of(sizes: Sequence[int], widths: Sequence[int], seed: int = 0) -> list[list[Tensor]]:
    """For each rank, columns of bytes that differ, and whose rows lie apart."""
    random = torch.Generator().manual_seed(seed)
    return [
        [torch.randint(0, 256, (n, w + 5), generator=random).byte()[:, 3 : w + 3] for w in widths]
        for n in sizes
    ]


def check_dispatches(machine: Machine, seed: int = 0) -> None:
    """One after the other, one for each of the machine's widths; nothing keeps ranks in step."""
    sizes = [one.shape[0] for one in machine.marks]
    calls = [columns_of(sizes, widths, seed + i) for i, widths in enumerate(machine.widths)]
    arrived: list[list[list[Tensor]]] = [[] for _ in sizes]

    def job(rank: int) -> None:
        for columns in calls:
            arrived[rank].append(machine.dispatch(rank, columns[rank]))

    together(job, machine.size)
    for call, columns in enumerate(calls):
        for place in range(len(columns[0])):
            want = spec.dispatch([of_rank[place] for of_rank in columns], *machine.spec())
            assert_same([one[call][place] for one in arrived], [one.x for one in want])


MACHINES = st.fixed_dictionaries(
    {
        "num_channels": st.integers(1, 10),
        "num_used": st.integers(1, 10),
        "slots": st.sampled_from([1, 2, 3, 40]),
        "chunk": st.sampled_from([1, 2, 6]),
        "num_threads": st.integers(1, 2),
    }
)
SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=5)
DENSITIES = st.sampled_from([0.0, 0.3, 0.9, 1.0])
WIDTHS = st.lists(st.sampled_from([1, 4, 63, 64, 65, 200]), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(SIZES, DENSITIES, MACHINES, st.lists(WIDTHS, min_size=1, max_size=3), st.integers(0, 99))
def test_dispatches(sizes: Any, density: Any, shape: Any, widths: Any, seed: Any) -> None:
    check_dispatches(Machine(marks(sizes, density, seed), widths=widths, **shape), seed)


def test_long_rows_are_streamed() -> None:
    """Past the cache, whether rows begin on lines or not."""
    check_dispatches(Machine(marks([200, 300, 250], 0.6), widths=[(4096, 4), (4100, 8)], slots=9))


def random_rows(num_rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_combine(
    machine: Machine, hidden: int, dtype: torch.dtype, num_biases: int, num_topk: int
) -> None:
    """Twice, with a dispatch between: rows, weights and biases that differ."""
    ranks = range(machine.size)
    rows = [sum(machine.counts(rank)) for rank in ranks]
    xs = [random_rows(rows[rank], hidden, dtype, rank) for rank in ranks]
    weights = [random_rows(rows[rank], num_topk, torch.float32, 9 + rank) for rank in ranks]
    biases = [
        [random_rows(one.shape[0], hidden, dtype, 99 + i + rank) for i in range(num_biases)]
        for rank, one in enumerate(machine.marks)
    ]
    tokens = columns_of([one.shape[0] for one in machine.marks], (8,))
    sums: list[list[Tensor | None]] = [[] for _ in ranks]

    def job(rank: int) -> None:
        given = weights[rank] if num_topk else None
        sums[rank].extend(machine.combine(rank, xs[rank], given, biases[rank]))
        machine.dispatch(rank, tokens[rank])
        sums[rank].extend(machine.combine(rank, xs[rank]))

    together(job, machine.size)
    layouts, world = machine.spec()
    got = list(zip(*sums))
    assert_same(list(got[0]), spec.combine(xs, layouts, world, biases=biases))
    assert_same(list(got[2]), spec.combine(xs, layouts, world))
    if num_topk:
        assert_same(list(got[1]), spec.combine(weights, layouts, world))


@settings(max_examples=50, deadline=None)
@given(
    SIZES,
    DENSITIES,
    MACHINES,
    st.sampled_from([(0, 0, 0, 0, 0), (0, 1, 0, 2, 1)]),
    st.sampled_from([1, 17, 130]),
    st.integers(0, 2),
    st.sampled_from([0, 1, 8]),
    st.integers(0, 99),
)
def test_combine(
    sizes: Any,
    density: Any,
    shape: Any,
    nodes: Any,
    hidden: Any,
    num_biases: Any,
    num_topk: Any,
    seed: Any,
) -> None:
    machine = Machine(
        marks(sizes, density, seed),
        nodes=nodes[: len(sizes)],
        widths=[(2 * hidden, 4 * num_topk)],
        **shape,
    )
    check_combine(machine, hidden, torch.bfloat16, num_biases, num_topk)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nodes", [(0, 0, 0), (0, 1, 1)], ids=str)
def test_combine_of_every_dtype(dtype: torch.dtype, nodes: tuple[int, ...]) -> None:
    """Enough for streaming stores, where rows are of whole lines."""
    for hidden in (1152, 515):
        machine = Machine(
            marks([200, 150, 170], 0.7),
            num_channels=2,
            nodes=nodes,
            widths=[(hidden * dtype.itemsize, 32)],
        )
        check_combine(machine, hidden, dtype, 1, 8)


def one_way() -> tuple[Machine, list[Tensor], list[Tensor]]:
    """Rank 0 has two tokens for rank 1, each on its own channel; rank 1 has none."""
    sent = torch.tensor([[False, True], [False, True]])
    machine = Machine([sent, sent[:0]], num_channels=2)
    first, second = columns_of([2, 0], (64,))
    return machine, first, second


def test_a_call_waits_until_the_last_is_drained_on_all_channels() -> None:
    """Else rank 1 would take its rows for those that have yet to come on the other channel."""
    machine, rows, none = one_way()
    first, _ = machine.plan_dispatch(0, rows)
    assert kernels.ring_dispatch(first, 0, 2, 1) == 0
    get, outs = machine.plan_dispatch(1, none)
    assert kernels.ring_dispatch(get, 0, 1, 1) == 1
    second, _ = machine.plan_dispatch(0, [255 - rows[0]])
    assert kernels.ring_dispatch(second, 0, 2, 1) == 2
    assert second.awaited() == [1]
    assert kernels.ring_dispatch(get, 1, 2, 1) == 0
    assert kernels.ring_dispatch(second, 0, 2, 1) == 0
    before = get.moved
    assert kernels.ring_dispatch(get, 0, 2, 1) == 0
    assert get.moved == before
    assert_same(outs, rows)


@pytest.mark.parametrize("number", [-1, 2, 2**62])
def test_a_row_that_cannot_be_is_not_written_anywhere(number: int) -> None:
    machine, rows, none = one_way()
    send, _ = machine.plan_dispatch(0, rows)
    assert kernels.ring_dispatch(send, 0, 2, 1) == 0
    machine.memory[1][128:136].view(np.int64)[0] = number
    get, _ = machine.plan_dispatch(1, none)
    assert kernels.ring_dispatch(get, 0, 2, 1) == -1 - 0


@pytest.mark.parametrize("num_channels", [1, 3])
def test_nobody_waits_for_ever_for_a_rank_that_never_comes(num_channels: int) -> None:
    """Rank 2 of three. The others do what they can, and say for whom they wait."""
    machine = Machine(marks([20, 20, 20], 1.0), num_channels, slots=2)
    columns = columns_of([20] * 3, (64,))
    dispatches = [machine.plan_dispatch(rank, columns[rank])[0] for rank in (0, 1)]
    xs = [random_rows(60, 32, torch.bfloat16, rank) for rank in (0, 1)]

    def stall(kernel: Callable[..., int], plans: Sequence) -> None:
        before = -1
        while before < (before := sum(plan.moved for plan in plans)):
            left = [kernel(plan, 0, num_channels, 100) for plan in plans]
        assert [kernel(plan, 0, num_channels, 100) for plan in plans] == left  # it returns
        assert min(left) > 0
        assert [plan.awaited() for plan in plans] == [[2], [2]]

    stall(kernels.ring_dispatch, dispatches)
    machine = Machine(marks([20, 20, 20], 1.0), num_channels, slots=2)
    stall(kernels.ring_combine, [machine.plan_combine(r, xs[r], None, [])[0] for r in (0, 1)])


def test_who_owes_rows_is_named_before_who_gives_no_room() -> None:
    """Rank 1 may wait for rows itself, of rank 2 for one."""
    many = torch.tensor([[False, True, False]]).expand(20, 3)
    machine = Machine([many, many[:0], torch.tensor([[True, False, False]])])
    plan, _ = machine.plan_dispatch(0, columns_of([20], (64,))[0])
    assert kernels.ring_dispatch(plan, 0, 1, 5) > 0
    assert plan.awaited() == [2]


def test_slots_are_what_fits_beside_the_counters() -> None:
    assert kernels.ring_slots(128 + 3 * 64 + 63, [8, 40]) == 3
    assert kernels.ring_slots(128 + 128, [64]) == 1
    assert kernels.ring_slots(127, [1]) < 1
