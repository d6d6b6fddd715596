"""Train a layer whose router drifts, and let its experts follow the load.

python examples/rebalance_moe.py --plot rebalance.png          # 4 ranks, and one to compare with
python examples/rebalance_moe.py --steps 100 --every 25

Which experts tokens choose changes all the time: most go to a favourite and its neighbours, and the
favourite moves on. 16 experts lie in 24 slots of 4 ranks. A Balancer sees what all ranks chose in
each step; every `--every` steps it says which slots should hold copies of which experts, with as
few moves as it takes, and weights and Adam's states move there. The losses are those of one rank,
but for rounding. Ranks are threads of this process.
"""

from __future__ import annotations

import argparse
import math
import threading
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tokenyard import Replicas
from tokenyard.nn import MoE, RouterConfig, functional, rebalance, sum_replica_gradients
from tokenyard.planner.balancer import Balancer, Policy
from tokenyard.testing import run_virtual

EXPERTS, TOPK, HIDDEN, INNER, TOKENS = 16, 2, 32, 32, 256
RANKS, SLOTS = 4, 24
_seeding = threading.Lock()  # ranks are threads, and torch has one generator


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens of all ranks, and how much each expert is favoured."""
    generator = torch.Generator().manual_seed(step)
    favourite = step / 200 % EXPERTS  # it moves on by an expert every 200 steps
    distance = (torch.arange(EXPERTS) - favourite + EXPERTS / 2) % EXPERTS - EXPERTS / 2
    return torch.randn(TOKENS, HIDDEN, generator=generator), 0.5 * torch.exp(-distance.square() / 4)


def train(group: Any, steps: int, every: int) -> dict[str, Any]:
    """Losses of all ranks, how uneven each step was, and how many experts moved."""
    rank, size = group.rank(), group.size()
    losses, uneven, moved = [], [], 0
    start = Replicas.even(EXPERTS, size, SLOTS) if size > 1 else Replicas.even(EXPERTS, 1)
    policy = Policy(every=every, if_over=1.05, want=1.02) if every else None
    balancer = Balancer(start, policy) if policy else None
    with tokenyard.Buffer(group, placement=start) as buffer:
        with _seeding:
            torch.manual_seed(0)
            config = RouterConfig(num_experts=EXPERTS, num_topk=TOPK)
            layer = MoE(buffer, HIDDEN, INNER, config)
        optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
        for step in range(steps):
            tokens, favour = batch(step)
            mine = tokens.chunk(size)[rank]
            scores = torch.sigmoid(mine @ layer.router.weight.t()) + favour
            weights, topk_idx = scores.topk(TOPK)
            rows = functional.dispatch_by_expert(
                buffer, mine, topk_idx, weights.float(), num_experts=EXPERTS
            )
            y = layer.experts(rows.x, rows.offsets)
            out = functional.combine_by_expert(buffer, y, rows)
            loss = (out - mine.roll(1, 1)).square().sum() / TOKENS
            optimizer.zero_grad()
            loss.backward()
            sum_replica_gradients(layer)
            gradient = layer.router.weight.grad
            assert gradient is not None
            total = functional.sum_over_ranks(buffer, gradient.flatten())
            gradient.copy_(total.view_as(gradient))
            optimizer.step()

            chosen = topk_idx.flatten().bincount(minlength=EXPERTS)
            rows_here = torch.zeros(size)
            rows_here[rank] = len(rows.x)
            told = torch.cat([loss.detach()[None], rows_here, chosen])
            told = functional.sum_over_ranks(buffer, told)
            all_loss, rows_R, load_E = told.split([1, size, EXPERTS])
            losses.append(float(all_loss))
            uneven.append(float(rows_R.max() / rows_R.mean()))
            change = balancer.observe(load_E) if balancer else None
            if change:
                moved += len(rebalance(layer, change.placement, optimizer))
    return {"losses": losses, "uneven": uneven, "moved": moved}


def plot(path: str, still: list[float], moving: list[float], every: int) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    steps = range(1, len(still) + 1)
    averages = [f"{mean(one[every:]):.2f} after step {every}" for one in (still, moving)]
    axes.plot(steps, still, label=f"experts stay: {averages[0]}", linewidth=0.8)
    label = f"rebalanced every {every} steps: {averages[1]}"
    axes.plot(steps, moving, label=label, linewidth=0.8)
    axes.axhline(1, color="grey", linewidth=0.5)
    title = f"{EXPERTS} experts in {SLOTS} slots of {RANKS} ranks, a router that drifts"
    axes.set(xlabel="step", ylabel="rows of the busiest rank / mean", title=title)
    figure.legend(loc="outside lower center", ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--plot", metavar="FILE", help="imbalance before and after; matplotlib")
    args = parser.parse_args()
    patience = 60.0 + args.steps
    (one,) = run_virtual(train, 1, args.steps, 0, timeout=patience).results
    still = run_virtual(train, RANKS, args.steps, 0, timeout=patience).results[0]
    moving = run_virtual(train, RANKS, args.steps, args.every, timeout=patience).results[0]
    far = max(
        abs(a - b)
        for run in (still, moving)
        for a, b in zip(run["losses"], one["losses"], strict=True)
    )
    assert math.isfinite(far)
    print(f"loss {one['losses'][0]:.4f} at step 1, {one['losses'][-1]:.4f} at step {args.steps}")
    print(f"losses of {RANKS} ranks are those of one, but for {far:.1e}")
    print(f"busiest rank / mean after step {args.every}, on average:")
    print(f"  {mean(still['uneven'][args.every :]):.2f} where experts stay")
    print(
        f"  {mean(moving['uneven'][args.every :]):.2f} rebalanced every {args.every} steps, "
        f"{moving['moved']} experts moved"
    )
    if args.plot:
        plot(args.plot, still["uneven"], moving["uneven"], args.every)


if __name__ == "__main__":
    main()
