"""Experts that move, and experts with copies: training goes on as on one rank."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokenyard
from tokenyard import PeerInputError, Replicas, spec
from tokenyard.nn import (
    MoE,
    RouterConfig,
    average_expert_gradients,
    clip_grad_norm_,
    moving,
    rebalance,
    replica_gradients,
    sum_replica_gradients,
)
from tokenyard.nn.functional import sum_over_ranks
from tokenyard.testing import assert_same, run_virtual

FIRST = ((0, 1, 0), (2, 0), (3, 4), (5, 1, 0))
SECOND = ((5, 4), (0, 2), (3, 0, 2, 0), (1, 4))
EXPERTS, HIDDEN, INNER, TOKENS = 6, 12, 10, 24


_seeding = threading.Lock()  # ranks are threads, and torch has one generator


def make(buffer: tokenyard.Buffer, **options: Any) -> MoE:
    config = RouterConfig(num_experts=EXPERTS, num_topk=2)
    with _seeding:
        torch.manual_seed(3)
        return MoE(buffer, HIDDEN, INNER, config, **options)


def tokens(step: int) -> Tensor:
    """Of all ranks together."""
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(step))


def gradients_job(group: Any, slots: tuple[tuple[int, ...], ...], options: Any) -> Any:
    dtype, nodes, transport = options
    with tokenyard.Buffer(
        group, placement=Replicas(slots), ranks_per_node=nodes, transport=transport
    ) as buffer:
        layer = make(buffer).to(dtype)
        before = []
        for parameter in layer.experts.parameters():
            parameter.grad = torch.randn_like(parameter)
            before.append(parameter.grad.clone())
        sum_replica_gradients(layer)
        return before, [one.grad for one in layer.experts.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        (torch.float32, None, "direct"),
        (torch.bfloat16, 2, "hierarchical"),
        (torch.float64, 2, "collective"),
    ],
    ids=["float32", "bfloat16-nodes", "float64-nodes"],
)
@pytest.mark.parametrize("piece", [1 << 25, 300])
def test_gradients_of_copies_are_summed_as_spec_says(
    options: Any, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "PIECE", piece)
    monkeypatch.setattr(replica_gradients, "_WIDTH", 32 if piece < 1000 else 4096)
    outs = run_virtual(gradients_job, 4, SECOND, options).results
    nodes = (0, 0, 1, 1) if options[1] else (0, 0, 0, 0)
    for which in range(2):
        before = [before[which] for before, _ in outs]
        want = spec.sum_replica_gradients(before, spec.ReplicaWorld(SECOND, nodes))
        for rank, (_, after) in enumerate(outs):
            assert_same(after[which], want[rank], f"rank {rank}")


def train(group: Any, placements: list[Any], steps: int) -> dict[str, Any]:
    """Steps of Adam, with another placement before each step that has one."""
    rank, size = group.rank(), group.size()
    losses, norms = [], []
    with tokenyard.Buffer(group, placement=placements[0], transport="collective") as buffer:
        layer = make(buffer)
        average_expert_gradients(layer)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.02)
        moved = 0
        for step in range(steps):
            if step and step < len(placements) and placements[step] is not None:
                moved += len(rebalance(layer, placements[step], optimizer))
            mine = tokens(step).chunk(size)[rank]
            optimizer.zero_grad()
            loss = (layer(mine) - mine.flip(1)).square().sum() / TOKENS * size
            loss.backward()
            sum_replica_gradients(layer)
            for parameter in (layer.router.weight,):
                assert parameter.grad is not None
                total = sum_over_ranks(buffer, parameter.grad.flatten()) / size
                parameter.grad.copy_(total.view_as(parameter))
            norms.append(clip_grad_norm_(layer, 0.5))
            optimizer.step()
            losses.append(sum_over_ranks(buffer, loss.detach()[None]) / size)
        state = optimizer.state[layer.experts.down]
        return {
            "losses": torch.cat(losses),
            "norms": torch.stack(norms),
            "ids": layer.experts.ids,
            "weights": {name: one.detach() for name, one in layer.experts.named_parameters()},
            "states": {key: state[key] for key in ("exp_avg", "exp_avg_sq")},
            "moved": moved,
        }


def test_training_goes_on_as_on_one_rank() -> None:
    [one] = run_virtual(train, 1, [None], 6).results
    plain = torch.tensor([3, 3, 1, 0, 2, 2])
    run = run_virtual(train, 4, [Replicas(FIRST), None, Replicas(SECOND), None, plain], 6)
    for rank, out in enumerate(run.results):
        # The sums have other orders on other ranks.
        torch.testing.assert_close(out["losses"], one["losses"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(out["norms"], one["norms"], rtol=1e-5, atol=1e-6)
        assert out["ids"] == [e for e, owner in enumerate(plain.tolist()) if owner == rank]
        for kind in ("weights", "states"):
            for name, stack in out[kind].items():
                want = one[kind][name][out["ids"]]
                torch.testing.assert_close(stack, want, rtol=1e-4, atol=1e-5)


def test_copies_stay_equal_to_the_bit() -> None:
    outs = run_virtual(train, 4, [Replicas(FIRST), Replicas(SECOND)], 4).results
    found: dict[tuple[str, int], Tensor] = {}
    for out in outs:
        for name, stack in (*out["weights"].items(), *out["states"].items()):
            for local, expert in enumerate(out["ids"]):
                first = found.setdefault((name, expert), stack[local])
                assert_same(stack[local], first, f"{name} of expert {expert}")


def moving_job(group: Any, piece: int) -> int:
    rank = group.rank()
    with tokenyard.Buffer(group, placement=Replicas(FIRST), transport="collective") as buffer:
        moves = Replicas(FIRST).moves(Replicas(SECOND))
        buffer.rebalance(Replicas(SECOND))
        numbers = torch.arange(70_001, dtype=torch.float32)
        stack = torch.stack([numbers + 1e6 * expert for expert in FIRST[rank]])
        moved = moving.move_stack(buffer, moves, stack)
        want = torch.stack([numbers + 1e6 * expert for expert in SECOND[rank]])
        assert_same(moved, want, f"rank {rank}")
        return len({(m.source, m.target.rank) for m in moves.between_ranks})


@pytest.mark.parametrize("piece", [1 << 25, 100_000])
def test_moving_costs_little_more_than_the_experts(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "PIECE", piece)
    run = run_virtual(moving_job, 4, piece)
    sent = sum(int(sent.sum() - sent.trace()) for sent in run.bytes_sent.values())
    experts = run.results[0] * 70_001 * 4
    assert experts < sent < 1.2 * experts


def refused_job(group: Any) -> None:
    both = (ValueError, PeerInputError)
    with tokenyard.Buffer(group, placement=Replicas(FIRST)) as buffer:
        layer = make(buffer)
        lbfgs = torch.optim.LBFGS(layer.experts.parameters())
        lbfgs.state[layer.experts.down]["history"] = torch.zeros(3)
        given = (lbfgs,) if group.rank() == 1 else ()
        with pytest.raises(both, match="LBFGS"):
            rebalance(layer, Replicas(SECOND), *given)
        adam = torch.optim.Adam(layer.parameters())
        layer(tokens(0)).sum().backward()
        if group.rank() == 2:
            adam.step()
        with pytest.raises(ValueError, match="ranks differ in the experts' parameters"):
            rebalance(layer, Replicas(SECOND), adam)
        assert buffer.replicas == Replicas(FIRST)
        with pytest.raises(ValueError, match="holds no experts"):
            rebalance(nn.Linear(2, 2), Replicas(SECOND))


def test_what_cannot_move_raises_on_all_ranks_and_changes_nothing() -> None:
    run_virtual(refused_job, 4)


def test_fixed_sizes_follow_the_placement() -> None:
    def job(group: Any) -> tuple[Tensor, Tensor]:
        with tokenyard.Buffer(group, placement=Replicas(FIRST)) as buffer:
            layer = make(buffer, num_worst_tokens=4 * TOKENS)
            x = tokens(group.rank())
            before = layer(x)
            rebalance(layer, Replicas(SECOND))
            return before.detach(), layer(x).detach()

    for before, after in run_virtual(job, 4).results:
        torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-6)  # other orders of sums
