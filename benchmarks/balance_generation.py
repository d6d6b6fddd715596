"""Generation of a Qwen3-MoE of transformers whose routers are skewed, with a balance and without.

    python benchmarks/balance_generation.py --skew 1.0

Two ranks with one thread and 16 sequences each; weights are random, in float32. Both models are the
same, and take turns; figures are tokens a second of all ranks, medians over rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cases.vllm.models import skew
from tokenyard.integrations.transformers import expert_parallel
from tokenyard.testing import run_processes

SEQUENCES, PROMPT, ANSWER = 16, 32, 32


def make_model(args: argparse.Namespace) -> tuple[Any, list[float]]:
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=500,
        hidden_size=args.hidden,
        moe_intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_experts=64,
        num_experts_per_tok=8,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    return model, skew(model, args.skew, args.scattered)


@torch.no_grad()
def job(group: Any, args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {"by owner": {}, "balanced": {"balance": 0.05}}
    for name, options in ways.items():
        model, busiest = make_model(args)
        models[name] = expert_parallel(model, group, **options)
    prompt = torch.randint(
        1, 500, (SEQUENCES, PROMPT), generator=torch.Generator().manual_seed(group.rank())
    )
    seconds: dict[str, list[float]] = {name: [] for name in models}
    prefill: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(args.rounds + 1):
        for name in list(models)[:: 1 if turn % 2 else -1]:
            for times, length in ((prefill, 1), (seconds, ANSWER)):
                begin = time.perf_counter()
                models[name].generate(
                    prompt, max_new_tokens=length, min_new_tokens=length, do_sample=False
                )
                if turn:
                    times[name].append(time.perf_counter() - begin)
    told = models["balanced"].tokenyard_buffer.stats()["balance"]
    for model in models.values():
        model.tokenyard_buffer.close()
    return {"seconds": seconds, "prefill": prefill, "balance": told, "busiest": busiest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skew", type=float, default=1.0)
    parser.add_argument("--scattered", action="store_true", help="hot experts are on any rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=512)
    args = parser.parse_args()
    found = run_processes(job, 2, args, timeout=1800.0)[0]
    busiest = " ".join(f"{one:.2f}" for one in found["busiest"])
    print(f"busiest of two ranks over their mean, by layer: {busiest}")
    print(found["balance"])
    owner, even = found["seconds"]["by owner"], found["seconds"]["balanced"]
    first, sooner = found["prefill"]["by owner"], found["prefill"]["balanced"]
    for name in ("by owner", "balanced"):
        whole, begun = median(found["seconds"][name]), median(found["prefill"][name])
        tokens = 2 * SEQUENCES * (ANSWER - 1) / (whole - begun)
        print(f"{name}: prefill {2 * SEQUENCES * PROMPT / begun:.0f}, decode {tokens:.1f} tokens/s")
    gain = median(one / other for one, other in zip(first, sooner))
    print(f"prefill: {gain:.3f} times as fast with a balance")
    gain = median((one - a) / (other - b) for one, other, a, b in zip(owner, even, first, sooner))
    print(f"decode: {gain:.3f} times as fast with a balance")


if __name__ == "__main__":
    main()
