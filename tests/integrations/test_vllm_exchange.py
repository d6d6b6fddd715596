"""The exchange of the vLLM plugin: ids, rows for the kernel and sums, on virtual ranks."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tests.cases.nn.few import ordinary, watched
from tokenyard.integrations.vllm.exchange import Exchange
from tokenyard.integrations.vllm.settings import Settings
from tokenyard.integrations.vllm.watch import Watch
from tokenyard.observe import routing
from tokenyard.testing import assert_same, run_virtual
from tokenyard.testing import routing as choose
from tokenyard.topology import even_split

SETTINGS = Settings(enabled=True, transport="auto", timeout=scaled(60))
HIDDEN = 8


def tokens_of(rank: int, num_tokens: int, num_experts: int, num_topk: int) -> tuple[Tensor, ...]:
    """Small whole numbers, whose sums are the same in any order; ids as vLLM's router makes."""
    random = torch.Generator().manual_seed(rank)
    x = torch.randint(1, 5, (num_tokens, HIDDEN), generator=random).float()
    ids = torch.rand(num_tokens, num_experts, generator=random).topk(num_topk).indices
    weights = torch.randint(1, 4, ids.shape, generator=random).float()
    ids[::3, 0] = -1  # a choice that counts for nothing
    return x, ids.to(torch.int32), weights


def fake_experts(rows: Any, experts: list[int]) -> Tensor:
    """y = x * (e + 1), e the global id, so that a row at the wrong expert shows."""
    counts = rows.offsets.diff(prepend=rows.offsets.new_zeros(1)).long()
    expert_of_row = torch.tensor(experts).repeat_interleave(counts)
    return rows.x * (expert_of_row + 1)[:, None]


def expected(x: Tensor, ids: Tensor, weights: Tensor, known: Tensor) -> Tensor:
    """Sums over the experts that are known."""
    factor = ((ids + 1) * weights * known[ids.long()]).sum(1)  # -1 + 1 is 0
    return x * factor[:, None]


def through_experts(
    group: Any, ep_ranks: list[int], ep_size: int, case: tuple[int, ...], overlap: bool = False
) -> Tensor:
    """With overlap, the experts' output and the sums lie in one workspace, as vLLM's may."""
    exchange = Exchange(group, ep_ranks, ep_size, SETTINGS)
    num_experts, num_topk, *tokens = case
    with exchange.buffer as buffer:
        exchange.warm_up(torch.float32)
        x, ids, weights = tokens_of(buffer.rank, tokens[buffer.rank], num_experts, num_topk)
        owner, me = even_split(num_experts, ep_size), ep_ranks[buffer.rank]
        arrived = exchange.send(x, ids, weights, num_experts)
        y = fake_experts(arrived, [e for e, rank in enumerate(owner) if rank == me])
        if not overlap:
            return exchange.send_back(y, arrived)
        workspace = torch.cat([y, y.new_zeros(len(x), HIDDEN)])
        out = workspace[len(y) // 2 :][: len(x)]
        return exchange.send_back(workspace[: len(y)], arrived, out=out)


@pytest.mark.parametrize(
    "case",
    [(8, 2, 5, 3), (7, 3, 5, 4), (8, 8, 3, 0), (4, 1, 0, 1), (5, 2, 4, 1, 3)],
    ids=["even", "uneven experts", "idle rank", "one token", "three ranks"],
)
def test_tokens_meet_their_experts(case: tuple[int, ...]) -> None:
    num_experts, num_topk, *tokens = case
    size = len(tokens)
    got = run_virtual(through_experts, size, list(range(size)), size, case).results
    for rank, out in enumerate(got):
        x, ids, weights = tokens_of(rank, tokens[rank], num_experts, num_topk)
        assert_same(out, expected(x, ids, weights, torch.ones(num_experts)))


def test_sums_may_take_the_memory_of_what_is_summed() -> None:
    case = (8, 2, 5, 3)
    for rank, out in enumerate(run_virtual(through_experts, 2, [0, 1], 2, case, True).results):
        x, ids, weights = tokens_of(rank, case[2 + rank], 8, 2)
        assert_same(out, expected(x, ids, weights, torch.ones(8)))


@pytest.mark.parametrize("num_experts", [8, 10], ids=["even", "uneven"])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_tensor_parallel_ranks_take_their_own_experts(num_experts: int, tp_rank: int) -> None:
    """Two data parallel ranks of two tensor parallel ones each: these know half of the experts."""
    case, ep_ranks = (num_experts, 4, 5, 3), [tp_rank, 2 + tp_rank]
    got = run_virtual(through_experts, 2, ep_ranks, 4, case).results
    owner = torch.tensor(even_split(num_experts, 4))
    known = (owner % 2 == tp_rank).float()
    for rank, out in enumerate(got):
        x, ids, weights = tokens_of(rank, case[2 + rank], num_experts, 4)
        assert_same(out, expected(x, ids, weights, known))


@torch.inference_mode()
def skewed(group: Any, ep_ranks: list[int], balance: float | None) -> list[tuple[Tensor, int]]:
    """Sums and rows of three calls: of many tokens, of few, and, at last, not balanced."""
    settings = replace(SETTINGS, transport="direct", balance=balance)
    exchange, owner = Exchange(group, ep_ranks, 4, settings), even_split(10, 4)
    known, got = [e for e, rank in enumerate(owner) if rank in ep_ranks], []
    with exchange.buffer as buffer:
        exchange.warm_up(torch.float32)
        for seed, num_tokens, balanced in ((0, 300, True), (1, 40, True), (2, 40, False)):
            ids, weights = choose("skewed", num_tokens, 4, 10, seed=seed)
            x = torch.full((num_tokens, HIDDEN), 1.0 + buffer.rank)
            arrived = exchange.send(x, ids, weights.round(), 10, balanced)
            shared = balanced and balance is not None
            mine = [e for e in known if shared or owner[e] == ep_ranks[buffer.rank]]
            y = fake_experts(arrived, mine)
            got.append((exchange.send_back(y, arrived), len(y)))
    return got


@pytest.mark.parametrize("ep_ranks", [[0, 1, 2, 3], [1, 3]], ids=["all", "a tensor parallel rank"])
def test_balanced_ranks_have_as_many_rows(ep_ranks: list[int]) -> None:
    """Sums of small whole numbers, the same in any order."""
    size = len(ep_ranks)
    plain, balanced = (run_virtual(skewed, size, ep_ranks, one).results for one in (None, 0.0))
    for turn in range(3):
        sums, rows = ([[one[turn][i] for one in got] for got in (plain, balanced)] for i in (0, 1))
        assert_same(sums[1], sums[0])
        assert sum(rows[0]) == sum(rows[1])
        mean = sum(rows[0]) / size
        assert max(rows[0]) > 1.2 * mean
        assert rows[1] == rows[0] if turn == 2 else max(rows[1]) <= mean + 2


@torch.inference_mode()
def steps(group: Any, tp_rank: int, dtype: torch.dtype) -> None:
    """Few tokens go by an exchange that is prepared: the same bits, and what is kept stays."""
    settings = Settings(enabled=True, transport="direct", timeout=scaled(60))
    exchange = Exchange(group, [tp_rank, 2 + tp_rank], 4, settings)
    with exchange.buffer as buffer:
        exchange.warm_up(dtype)
        kept = []
        with watched(buffer) as taken:
            for turn, tokens in enumerate([(3, 1), (0, 2), (128, 5), (200, 4), (1, 1), (3, 1)]):
                x, ids, weights = tokens_of(buffer.rank + 10 * turn, tokens[buffer.rank], 8, 4)
                given = x.to(dtype), ids, weights, 8

                def there_and_back(given: Any = given, turn: int = turn) -> list[Tensor]:
                    arrived = exchange.send(*given)
                    weigh, y = turn % 2 == 0, arrived.x * 2
                    out = torch.empty_like(given[0]) if turn % 3 else None
                    return [arrived.x, arrived.offsets, exchange.send_back(y, arrived, weigh, out)]

                with ordinary(buffer):
                    want = there_and_back()
                kept.append((there_and_back(), want))
        for got, want in kept:
            assert_same(got, want)
        assert taken == [[3, 0, 128, 1, 3], [1, 2, 5, 4, 1, 1]][buffer.rank]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_few_tokens(tp_rank: int, dtype: torch.dtype) -> None:
    run_virtual(steps, 2, tp_rank, dtype)


def test_expert_map_is_vllms() -> None:
    def job(group: Any, ep_ranks: list[int]) -> list[int]:
        exchange = Exchange(group, ep_ranks, 3, SETTINGS)
        with exchange.buffer:
            return exchange.expert_map(5)

    want = [[0, 1, -1, -1, -1], [-1, -1, 0, 1, -1], [-1, -1, -1, -1, 0]]
    assert run_virtual(job, 3, [0, 1, 2]).results == want
    assert run_virtual(job, 2, [0, 2]).results == [want[0], want[2]]


def test_every_rank_gets_every_token_and_sums_come_back() -> None:
    def job(group: Any) -> tuple[list[Tensor], Tensor]:
        exchange = Exchange(group, range(3), 3, SETTINGS)
        with exchange.buffer as buffer:
            x, ids, weights = tokens_of(buffer.rank, 2 + buffer.rank, 6, 2)
            gathered, handle = exchange.gather([x, ids, weights.to(torch.bfloat16)])
            partial = gathered[0] * (buffer.rank + 1)
            return gathered, buffer.combine(partial, handle).x

    got = run_virtual(job, 3).results
    parts = [tokens_of(rank, 2 + rank, 6, 2) for rank in range(3)]
    for rank, (gathered, summed) in enumerate(got):
        for column, one in enumerate(gathered):
            whole = torch.cat([part[column] for part in parts])
            assert_same(one, whole.to(torch.bfloat16) if column == 2 else whole)
        assert_same(summed, parts[rank][0] * 6)


class DyingBuffer:
    rank = 0

    def __init__(self) -> None:
        self.dead: tuple[int, ...] = ()
        self.asked = threading.Event()  # since somebody is dead

    def dead_ranks(self) -> tuple[int, ...]:
        dead = self.dead
        if dead:
            self.asked.set()
        return dead


class Lines(list[str]):
    def error(self, text: str, *args: Any) -> None:
        self.append(text % args)


def test_a_death_is_told_at_once_and_once() -> None:
    buffer, lines = DyingBuffer(), Lines()
    watch = Watch(buffer, lines)  # type: ignore[arg-type]
    buffer.dead = (1, 3)
    deadline = time.monotonic() + scaled(30)
    while not lines and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(scaled(0.2))
    watch.stop()
    assert lines == ["PeerDied: ranks 1, 3 died, on rank 0"]


def test_a_rank_that_ends_itself_blames_nobody() -> None:
    buffer, lines = DyingBuffer(), Lines()
    watch = Watch(buffer, lines)  # type: ignore[arg-type]
    buffer.dead = (1,)
    assert buffer.asked.wait(scaled(30))
    watch.stop()  # before the death is told
    time.sleep(scaled(0.4))
    assert lines == []


class Layer(torch.nn.Module):
    """As vLLM's: it knows its own name."""

    layer_name = "model.layers.3.mlp.experts"

    def forward(self, exchange: Exchange, given: Any) -> None:
        x, ids, weights = given
        exchange.send(x, ids, weights, 4)


def test_a_recording_has_layers_and_no_warming_up(tmp_path: Path) -> None:
    def job(group: Any) -> Tensor:
        exchange = Exchange(group, range(2), 2, SETTINGS)
        with exchange.buffer as buffer:
            exchange.warm_up(torch.float32)
            given = tokens_of(buffer.rank, 5, 4, 2)
            Layer()(exchange, given)
            return given[1]

    with tokenyard.record(tmp_path / "routing.pt"):
        chosen = run_virtual(job, 2).results
    (layer,) = routing.load(tmp_path / "routing.pt")
    assert (layer.name, layer.num_steps) == (Layer.layer_name, 1)
    assert_same(layer.topk_idx, torch.cat(chosen).to(torch.int16))
