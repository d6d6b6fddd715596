"""Train a small language model, byte by byte, whose experts live on all ranks.

torchrun --nproc-per-node 4 examples/train_moe.py --plot loss.png
torchrun --nproc-per-node 2 examples/train_moe.py --steps 100 --save checkpoint
torchrun --nproc-per-node 4 examples/train_moe.py --load checkpoint  # goes on, on other ranks
python examples/train_moe.py --losses one.txt  # numbers, for --plot loss.png --beside one.txt

Its text is the language reference that comes with Python. The batch of a step is the same whatever
the number of ranks, and so are the losses, but for rounding. Number of ranks: any that divides the
32 sequences of a batch.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import tokenyard
from tokenyard.nn import MoE, RouterConfig, auxiliary_losses, checkpoint_state, prepare_for_ddp

HIDDEN, HEADS, LAYERS, CONTEXT, BATCH = 64, 4, 2, 64, 32
ROUTER = RouterConfig(num_experts=8, num_topk=2, auxiliary_loss=0.01)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, buffer: tokenyard.Buffer) -> None:
        super().__init__()
        self.attention, self.moe = Attention(), MoE(buffer, HIDDEN, 2 * HIDDEN, ROUTER)
        self.before_attention, self.before_moe = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.moe(self.before_moe(x))


class LanguageModel(nn.Module):
    def __init__(self, buffer: tokenyard.Buffer) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, HIDDEN)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT, HIDDEN))
        self.blocks = nn.Sequential(*(Block(buffer) for _ in range(LAYERS)))
        self.out = nn.Sequential(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 256, bias=False))

    def forward(self, text: Tensor) -> Tensor:
        """The mean loss of each byte of text [sequences, CONTEXT + 1] given those before it."""
        logits = self.out(self.blocks(self.byte(text[:, :-1]) + self.place))
        return cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


class Training:
    """A model, its optimiser, and this rank's part of every batch."""

    def __init__(self, buffer: tokenyard.Buffer) -> None:
        torch.manual_seed(0)  # all ranks begin with the same model
        self.buffer, self.step = buffer, 0
        self.model = LanguageModel(buffer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, eps=1e-6)
        prepare_for_ddp(self.model)
        self.wrapped = DistributedDataParallel(self.model)
        topics = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
        self.text = torch.frombuffer(bytearray(topics.encode()), dtype=torch.uint8)

    def batch(self) -> Tensor:
        """[sequences of this rank, CONTEXT + 1] of the BATCH that all ranks draw alike."""
        generator = torch.Generator().manual_seed(self.step)
        starts = torch.randint(len(self.text) - CONTEXT, (BATCH,), generator=generator)
        mine = starts.chunk(self.buffer.group_size)[self.buffer.rank]
        return torch.stack([self.text[start : start + CONTEXT + 1] for start in mine]).long()

    def run(self, num_steps: int) -> Iterator[float]:
        """The loss of each step until num_steps are done, of all ranks' sequences."""
        while self.step < num_steps:
            self.optimizer.zero_grad()
            loss = self.wrapped(self.batch())
            (loss + auxiliary_losses(self.model)).backward()
            self.optimizer.step()
            self.step += 1
            dist.all_reduce(shown := loss.detach() / self.buffer.group_size)
            yield shown.item()

    def save(self, path: str) -> None:
        step = torch.tensor(self.step)
        dcp.save({**checkpoint_state(self.model, self.optimizer), "step": step}, checkpoint_id=path)

    def load(self, path: str) -> None:
        step = torch.tensor(0)
        dcp.load({**checkpoint_state(self.model, self.optimizer), "step": step}, checkpoint_id=path)
        self.step = int(step)


def show(losses: Iterator[float], first: int, last: int) -> Iterator[float]:
    """A bar if there is tqdm, else a line every 20 steps."""
    try:
        from tqdm import tqdm
    except ImportError:
        for step, loss in enumerate(losses, first + 1):
            if step % 20 == 0 or step == last:
                print(f"step {step} of {last}: loss {loss:.4f}", flush=True)
            yield loss
        return
    with tqdm(initial=first, total=last, unit="step") as bar:
        for loss in losses:
            bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            bar.update()
            yield loss


def plot(curve: list[float], first: int, num_ranks: int, args: argparse.Namespace) -> None:
    """This run's losses, and above them how far those of `--beside` are from them."""
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, sharex=True, figsize=(7, 5), height_ratios=(1, 3), layout="constrained"
    )
    steps = range(first + 1, first + 1 + len(curve))
    bottom.plot(steps, curve, label=f"{num_ranks} ranks")
    for path in args.beside:
        other = [float(line) for line in Path(path).read_text().split()]
        bottom.plot(steps, other, linestyle="--", label=Path(path).stem)
        far = [abs(a - b) for a, b in zip(curve, other, strict=True)]
        top.plot(steps, far, label=f"{Path(path).stem}: at most {max(far):.1e}")
    top.set(ylabel="difference", title=f"{ROUTER.num_experts} experts on {num_ranks} ranks")
    bottom.set(xlabel="step", ylabel="nats a byte")
    top.set_visible(bool(args.beside))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        if args.beside:
            axes.legend()
    figure.savefig(args.plot, dpi=150)


def train(buffer: tokenyard.Buffer, args: argparse.Namespace) -> None:
    training = Training(buffer)
    if args.load:
        training.load(args.load)
    first, losses = training.step, training.run(args.steps)
    curve = list(show(losses, first, args.steps) if buffer.rank == 0 else losses)
    if args.save:
        training.save(args.save)
    if buffer.rank == 0 and curve:
        print(f"loss {curve[0]:.4f} at step {first + 1}, {curve[-1]:.4f} at step {args.steps}")
        if args.losses:
            Path(args.losses).write_text("".join(f"{loss}\n" for loss in curve))
        if args.plot:
            plot(curve, first, buffer.group_size, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", metavar="FOLDER")
    parser.add_argument("--load", metavar="FOLDER")
    parser.add_argument("--plot", metavar="FILE", help="the loss curve; needs matplotlib")
    parser.add_argument("--losses", metavar="FILE", help="the losses, a line each")
    parser.add_argument("--beside", metavar="FILE", nargs="*", default=[], help="others to draw")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tokenyard.Buffer(dist.group.WORLD) as buffer:
        train(buffer, args)
    # A DistributedDataParallel must be gone by now: one that outlives its group can hang (gloo).
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
