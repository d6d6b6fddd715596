"""Record what a router chooses while it learns, and look at it.

    python examples/record_routing.py               # four ranks as threads of one process
    torchrun --nproc-per-node 4 examples/record_routing.py
    tokenyard inspect routing.pt --html routing.html

Tokens come from 16 topics, the first as often as all others together. A router without a balancing
loss sends a topic to experts of its own, so a few experts, and their rank, get most of the rows.
`--balance` gives it the loss: record again, and compare.
"""

from __future__ import annotations

import argparse
import os
import threading
from typing import Any

import torch
from torch import Tensor, nn

import tokenyard
from tokenyard.nn import MoE, RouterConfig, auxiliary_losses, expert_parameters
from tokenyard.testing import run_virtual

HIDDEN, TOPICS, TOKENS = 32, 16, 256
_making = threading.Lock()  # threads share torch's random numbers


class Model(nn.Module):
    def __init__(self, buffer: tokenyard.Buffer, loss: float) -> None:
        super().__init__()
        router = RouterConfig(num_experts=16, num_topk=2, auxiliary_loss=loss)
        self.layers = nn.ModuleList(MoE(buffer, HIDDEN, 64, router) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def train(group: Any, args: argparse.Namespace) -> None:
    numbers = torch.Generator().manual_seed(1)
    topics = 3 * torch.randn(TOPICS, HIDDEN, generator=numbers)
    wanted = torch.randn(TOPICS, HIDDEN, generator=numbers)
    odds = torch.tensor([TOPICS - 1.0] + [1.0] * (TOPICS - 1))
    numbers.manual_seed(100 + group.rank())  # each rank has tokens of its own
    with tokenyard.Buffer(group) as buffer:
        with _making:
            torch.manual_seed(5)
            model = Model(buffer, 0.1 if args.balance else 0.0)
        own = {id(one) for one in expert_parameters(model)}
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        with tokenyard.record(args.out):
            for step in range(args.steps):
                topic = odds.multinomial(TOKENS, replacement=True, generator=numbers)
                x = topics[topic] + torch.randn(TOKENS, HIDDEN, generator=numbers)
                loss = (model(x) - wanted[topic]).square().mean()
                optimizer.zero_grad()
                (loss + auxiliary_losses(model)).backward()
                for one in model.parameters():
                    if id(one) not in own and one.grad is not None:  # a copy on every rank
                        one.grad.copy_(buffer.all_gather(one.grad[None]).x.mean(0))
                optimizer.step()
                if group.rank() == 0 and (step + 1) % 20 == 0:
                    print(f"step {step + 1}: loss {float(loss.detach()):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record what a router chooses while it learns.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--balance", action="store_true", help="with a balancing loss")
    parser.add_argument("--out", default="routing.pt")
    args = parser.parse_args()
    if "RANK" in os.environ:
        train(tokenyard.local_group(), args)
    else:
        run_virtual(train, 4, args, timeout=600)
    if os.environ.get("RANK", "0") == "0":
        print(f"look at it: tokenyard inspect {args.out}")


if __name__ == "__main__":
    main()
