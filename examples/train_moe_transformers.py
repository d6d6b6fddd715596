"""Train a small Qwen3-MoE with transformers' own FSDP2 and expert parallelism, in two ways.

torchrun --nproc-per-node 4 examples/train_moe_transformers.py

transformers shards, loads and trains the model. `ep_implementation` names who moves the tokens:
"all_to_all" of transformers, and then "tokenyard", with the same losses. Needs
`pip install '.[transformers]' accelerate` in a clone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar

import tokenyard.integrations.transformers  # noqa: F401 - registers "tokenyard"
from tokenyard.nn import clip_grad_norm_

disable_progress_bar()
warnings.filterwarnings("ignore", module="transformers")

CONFIG = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=256,
    moe_intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    num_experts=32,
    num_experts_per_tok=4,
)
SEQUENCES, LENGTH = 4, 128  # of each rank's batch


def train(path: str, ep_implementation: str, num_steps: int) -> tuple[list[float], float]:
    """The mean loss of every step, and tokens a second of all ranks."""
    num_ranks = dist.get_world_size()
    config = DistributedConfig(
        fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation=ep_implementation
    )
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, begin = [], 0.0
    for step in range(num_steps + 1):
        if step == 1:  # the first one warms up
            begin = time.perf_counter()
        # Bytes that climb by a step of their own: something to learn in a few steps.
        first, climb = torch.randint(1, 16, (2, SEQUENCES, 1), generator=generator)
        input_ids = (first + climb * torch.arange(LENGTH)) % CONFIG.vocab_size
        loss = model(input_ids, labels=input_ids).loss
        loss.backward()
        clip_grad_norm_(model, 1.0)  # torch's own raises here: experts have a mesh of their own
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / num_ranks
        dist.all_reduce(mean)
        losses.append(float(mean))
    spent = time.perf_counter() - begin
    return losses, num_steps * num_ranks * SEQUENCES * LENGTH / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    with tempfile.TemporaryDirectory() as folder:
        told = [folder]
        dist.broadcast_object_list(told)  # rank 0's, for all: they share a file system
        if is_first:
            torch.manual_seed(0)
            Qwen3MoeForCausalLM(CONFIG).save_pretrained(folder)
        dist.barrier()
        seen = {name: train(told[0], name, args.steps) for name in ("all_to_all", "tokenyard")}
        dist.barrier()
    if is_first:
        print(f"{'step':>4}  " + "  ".join(f"{name:>10}" for name in seen))
        for step, losses in enumerate(zip(*(losses for losses, _ in seen.values()))):
            print(f"{step:4}  " + "  ".join(f"{loss:10.6f}" for loss in losses))
        for name, (_, speed) in seen.items():
            print(f"{name}: {speed:.0f} tokens/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
