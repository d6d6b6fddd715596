"""Each kernel of each set against `spec`, or against a loop where `spec` has no such step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.cases.kernel_sets import FOR_CPUS, SETS
from tests.cases.lanes import at_night
from tokenyard import kernels, spec
from tokenyard.kernels import Kernels
from tokenyard.testing import ROUTINGS, assert_same, poisoned, routing
from tokenyard.topology import Placement, Topology
from tokenyard.types import Layout, Route

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=SETS)
def kernel_set(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    with poisoned():
        yield kernels.load(request.param)


def marks(num_tokens: int, num_ranks: int, density: float, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_ranks, generator=random) < density


def test_unknown_set_names_those_there_are() -> None:
    with pytest.raises(
        ValueError, match="unknown kernel set 'nmba'; available: auto, numba, refer"
    ):
        kernels.load("nmba")


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(
    "num_ranks", at_night([1, 2, 3, 8, 16, 24, 63, 64, 65, 72], (1, 3, 8, 63, 64, 65))
)
def test_layout(kernel_set: Kernels, num_ranks: int, kind: str) -> None:
    # More than 255 tokens: the word kernel counts in bytes, and must empty them in time.
    topk_idx, _ = routing(kind, 600, 3, 2 * num_ranks + 1)
    world = spec.World.even(2 * num_ranks + 1, num_ranks)
    ranks = torch.tensor(world.rank_of_expert, dtype=torch.int32)
    got, first_bad = kernel_set.layout(topk_idx, ranks, num_ranks, None)
    assert first_bad == -1
    assert_same(got, spec.layout(topk_idx, world))


@pytest.mark.parametrize("ranks_per_node", [1, 3, 8])
def test_layout_with_nodes(kernel_set: Kernels, ranks_per_node: int) -> None:
    topk_idx, _ = routing("holes", 40, 5, 32)
    world = spec.World.even(32, 16, ranks_per_node)
    ranks = torch.tensor(world.rank_of_expert, dtype=torch.int32)
    nodes = Topology.even(16, ranks_per_node).node_of_rank
    got, _ = kernel_set.layout(topk_idx, ranks, 16, nodes)
    assert_same(got, spec.layout(topk_idx, world))


@pytest.mark.parametrize("num_ranks", [3, 8])
@pytest.mark.parametrize("bad", [12, -2, 2**40, -(2**62)])
def test_layout_finds_the_first_bad_index(kernel_set: Kernels, num_ranks: int, bad: int) -> None:
    topk_idx, _ = routing("holes", 20, 4, 12)
    topk_idx[7, 2] = topk_idx[9, 0] = bad
    ranks = Placement.even(12, num_ranks).rank_of_expert
    assert kernel_set.layout(topk_idx, ranks, num_ranks, None)[1] == 7 * 4 + 2


@pytest.mark.parametrize("num_ranks", [1, 5, 8, 11, 64, 70])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_route(kernel_set: Kernels, num_ranks: int, density: float) -> None:
    sent = marks(50, num_ranks, density)
    got = kernel_set.route(sent)
    rows = [(r, t) for r in range(num_ranks) for t in range(50) if sent[t, r]]
    copies = [(t, r) for t in range(50) for r in range(num_ranks) if sent[t, r]]
    slot = {}
    for rank, group in itertools.groupby(rows, key=lambda row: row[0]):
        slot.update({(t, rank): n for n, (_, t) in enumerate(group)})
    per_token = sent.sum(1).tolist()
    assert got.send_token.tolist() == [t for _, t in rows]
    assert got.send_counts == tuple(sent.sum(0).tolist())
    assert got.copy_start.tolist() == list(itertools.accumulate(per_token, initial=0))
    assert got.copy_rank.tolist() == [r for _, r in copies]
    assert got.copy_slot.tolist() == [slot[copy] for copy in copies]
    tensors = (got.send_token, got.copy_start, got.copy_rank, got.copy_slot)
    assert all(one.dtype == torch.int32 for one in tensors)


def test_pack_gathers_rows_that_lie_apart(kernel_set: Kernels) -> None:
    x = torch.randint(0, 256, (9, 40), dtype=torch.uint8)[:, 3:20]
    index = torch.tensor([8, 0, 0, 5], dtype=torch.int32)
    records = torch.zeros(4, 30, dtype=torch.uint8)
    kernel_set.pack(x, index, records[:, 7:24])
    assert_same(records[:, 7:24].clone(), x[index.long()])
    assert records[:, :7].sum() == 0
    assert records[:, 24:].sum() == 0


def test_pack_without_an_index_copies(kernel_set: Kernels) -> None:
    x = torch.randint(0, 256, (9, 40), dtype=torch.uint8)
    assert_same(kernel_set.pack(x[:, :33], None, torch.empty(9, 33, dtype=torch.uint8)), x[:, :33])
    none = torch.empty(0, 4, dtype=torch.uint8)
    assert_same(kernel_set.pack(none, None, none.clone()), none)


def test_localise(kernel_set: Kernels) -> None:
    # 4 is one past the table: it may come from a peer's memory, and must not reach an address.
    topk_idx = torch.tensor([[0, 3, -1], [2, 1, 4], [3, 3, -(2**62)]])
    weights = torch.arange(1.0, 10.0).reshape(3, 3)
    kernel_set.localise(topk_idx, weights, torch.tensor([-1, -1, 0, 1]))
    assert topk_idx.tolist() == [[-1, 1, -1], [0, -1, -1], [1, 1, -1]]
    assert weights.tolist() == [[0, 2, 0], [4, 0, 0], [7, 8, 0]]
    kernel_set.localise(topk_idx, None, torch.tensor([5, 6]))
    assert topk_idx.tolist() == [[-1, 6, -1], [5, -1, -1], [6, 6, -1]]


def reduce_and_spec(
    kernel_set: Kernels,
    rows: Tensor,
    route: Route,
    sent: Tensor,
    nodes: tuple[int, ...],
    biases: list,
) -> tuple[Tensor, Tensor]:
    """One rank's tokens, reduced; the other ranks of the specification send nothing."""
    num_ranks = sent.shape[1]
    world = spec.World(tuple(range(num_ranks)), nodes)
    silent = Layout(torch.zeros(1), None, torch.zeros(1), sent[:0])
    layouts = [Layout(torch.zeros(1), None, torch.zeros(1), sent)] + [silent] * (num_ranks - 1)
    by_rank = list(rows.split(list(route.send_counts)))
    want = spec.combine(by_rank, layouts, world, biases=[biases] + [[]] * (num_ranks - 1))
    out = torch.empty_like(want[0])
    return kernel_set.reduce(rows, route, nodes, biases, out), want[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", at_night([1, 15, 16, 33, 512, 513, 1100], (1, 33, 513)))
@pytest.mark.parametrize("nodes", [(0,) * 6, (0, 0, 1, 1, 2, 2), (0, 1, 0, 2, 1, 0)], ids=str)
def test_reduce(
    kernel_set: Kernels, dtype: torch.dtype, hidden: int, nodes: tuple[int, ...]
) -> None:
    sent = marks(20, 6, 0.5)
    route = kernel_set.route(sent)
    random = torch.Generator().manual_seed(hidden)
    rows = torch.randn(int(sent.sum()), hidden, generator=random).to(dtype)
    biases = [torch.randn(20, hidden, generator=random).to(dtype) for _ in range(hidden % 3)]
    got, want = reduce_and_spec(kernel_set, rows, route, sent, nodes, biases)
    assert_same(got, want)


@pytest.mark.parametrize("kernel_set", FOR_CPUS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 8])
def test_reduce_of_much(kernel_set: Kernels, dtype: torch.dtype, offset: int) -> None:
    """Enough for streaming stores, which want lines: on their boundary, and beside it."""
    sent = marks(300, 3, 0.6)
    route = kernel_set.route(sent)
    rows = torch.randn(int(sent.sum()), 1152).to(dtype)
    biases = [torch.randn(300, 1152).to(dtype)]
    _, want = reduce_and_spec(kernel_set, rows, route, sent, (0, 0, 0), biases)
    out = torch.empty(300 * 1152 + 64, dtype=dtype)[offset : offset + 300 * 1152].view(300, 1152)
    assert_same(kernel_set.reduce(rows, route, (0, 0, 0), biases, out), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nodes", [(0, 0), (0, 1)], ids=str)
def test_reduce_of_every_kind_of_number(
    kernel_set: Kernels, dtype: torch.dtype, nodes: tuple[int, ...]
) -> None:
    """Zeros of both signs, denormals, the largest numbers, infinities, NaN, ties in rounding."""
    info = torch.finfo(dtype)
    values = torch.tensor(
        [
            *(0.0, -0.0, info.tiny, info.tiny / 2, info.max, -info.max, info.eps, 1 + info.eps),
            *(1.0, 3.0, 256.0, 257.0, float("inf"), float("-inf"), float("nan")),
        ],
        dtype=torch.float64,
    ).to(dtype)
    pairs = torch.cartesian_prod(values, values)
    sent = torch.ones(1, 2, dtype=torch.bool)
    got, want = reduce_and_spec(
        kernel_set, pairs.t().contiguous(), kernel_set.route(sent), sent, nodes, []
    )
    assert_same(got, want)


def test_reduce_of_all_bfloat16_bit_patterns(kernel_set: Kernels) -> None:
    """Each of the 65,536 values, added to its neighbour."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    rows = torch.stack([bits.view(torch.bfloat16), bits.roll(1).view(torch.bfloat16)])
    sent = torch.ones(1, 2, dtype=torch.bool)
    got, want = reduce_and_spec(kernel_set, rows, kernel_set.route(sent), sent, (0, 0), [])
    assert_same(got, want)


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_do_not_change_bits(num_threads: int) -> None:
    """Enough bytes that the numba set takes threads; see threads.py."""
    numba = kernels.load("numba")
    sent = marks(1501, 3, 0.7)
    route = numba.route(sent)
    rows = torch.randn(int(sent.sum()), 4097).bfloat16()
    as_rows = rows.view(torch.uint8)
    index = torch.arange(len(rows) - 1, -1, -1, dtype=torch.int32)

    def both() -> tuple[Tensor, Tensor]:
        packed = numba.pack(as_rows, index, torch.empty_like(as_rows))
        out = torch.empty(1501, 4097, dtype=torch.bfloat16)
        return numba.reduce(rows, route, (0, 0, 0), [], out), packed

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = both()
        torch.set_num_threads(num_threads)
        assert_same(both(), alone)
    finally:
        torch.set_num_threads(before)
