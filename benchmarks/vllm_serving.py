"""Tokens a second of vLLM's server on two ranks: the plugin, and the same with gloo's collectives.

    python benchmarks/vllm_serving.py      # in an environment of .ci/vllm-env; some minutes

Both servers run the plugin. In the second its Exchange is replaced by all-gather and reduce-scatter
over gloo (`Gathered` of vllm_exchange.py), by a plugin of our own that vLLM finds beside it; what
else surrounds the experts kernel is the same. The model has two layers of 64 experts, top-8, hidden
size 2048, and random weights. "prefill" is prompts of 1024 tokens, of which one token is asked for;
"decode" 32 sequences at once, 64 tokens each.
"""

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.vllm_exchange import Gathered
from tokenyard.integrations.vllm.exchange import Arrived, Exchange
from tokenyard.ops.permute import permute, unpermute


class GlooExchange(Exchange):
    """All-gather and reduce-scatter, padded to the rank with most tokens."""

    def send(self, x: Any, topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> Arrived:
        group = self.buffer.group
        gloo = Gathered(group)
        most = torch.tensor(x.shape[0])
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        short = int(most) - x.shape[0]
        pad = torch.nn.functional.pad
        all_x, all_ids, all_weights = gloo.there(
            pad(x, (0, 0, 0, short)),
            pad(topk_ids.long(), (0, 0, 0, short), value=num_experts),
            pad(topk_weights.float(), (0, 0, 0, short)),
        )
        local = torch.tensor([*self.expert_map(num_experts), -1])
        rows = permute(all_x, local[all_ids], self.experts(num_experts).num_local)
        self._num_tokens = x.shape[0]
        return Arrived(rows=rows, weights=all_weights, handle=gloo)  # type: ignore[arg-type]

    def send_back(
        self, y: Tensor, arrived: Arrived, weights: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        partial = unpermute(y, arrived.rows.row_of, weights=weights)
        gloo: Any = arrived.handle
        summed = gloo.back(partial)[: self._num_tokens]
        return summed if out is None else out.copy_(summed)


def register() -> None:
    """An entry point of vLLM's, for the second server."""
    import tokenyard.integrations.vllm.manager as manager

    manager.Exchange = GlooExchange  # type: ignore[misc]


def measure(model: Path, log: Path, **environment: str) -> dict[str, float]:
    from tests.cases.vllm.server import serve

    chance = random.Random(1)
    long = [[chance.randrange(1, 500) for _ in range(1024)] for _ in range(8)]
    short = [[chance.randrange(1, 500) for _ in range(8)] for _ in range(32)]
    options = ("--data-parallel-size", "2", "--enable-expert-parallel", "--max-model-len", "1100")
    more = ("--max-num-batched-tokens", "2048", "--no-enable-prefix-caching")
    with serve(model, log, *options, *more, **environment) as server:
        figures = {}
        for name, prompts, num_tokens, tokens in (
            ("prefill", long, 1, 8 * 1024),
            ("decode", short, 64, 32 * 64),
        ):
            server.complete_all(prompts, num_tokens)
            begin = time.perf_counter()
            server.complete_all(prompts, num_tokens)
            figures[name] = tokens / (time.perf_counter() - begin)
    return figures


def main() -> None:
    from tests.cases.vllm.models import save

    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    bind = "|".join(",".join(map(str, part)) for part in (cores[:half], cores[half:]))
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        model = save(
            "qwen3",
            here / "model",
            hidden_size=2048,
            num_attention_heads=16,
            head_dim=128,
            num_experts=64,
            num_experts_per_tok=8,
            moe_intermediate_size=256,
            max_position_embeddings=2048,
        )
        plugin = here / "path" / "gloo_exchange-1.dist-info"
        plugin.mkdir(parents=True)
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: gloo-exchange\nVersion: 1\n")
        entry = "gloo = benchmarks.vllm_serving:register"
        (plugin / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        ours = measure(model, here / "ours.log", VLLM_CPU_OMP_THREADS_BIND=bind)
        gloo = measure(
            model,
            here / "gloo.log",
            VLLM_CPU_OMP_THREADS_BIND=bind,
            PYTHONPATH=os.pathsep.join([str(here / "path"), *paths]),
        )
    print(f"{'tokens/s':12}{'tokenyard':>12}{'gloo':>12}{'times':>8}")
    for name, figure in ours.items():
        print(f"{name:12}{figure:12.1f}{gloo[name]:12.1f}{figure / gloo[name]:8.2f}")


if __name__ == "__main__":
    main()
