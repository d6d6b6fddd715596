"""Decode with a prepared exchange, beside the same steps with the ordinary calls.

    torchrun --nproc-per-node 2 examples/decoding.py

Each rank has some sequences, of which a step makes one token each. They end one after the other, on
some ranks sooner, so that ranks have ever fewer tokens, and at last none. A rank without tokens
makes the calls all the same, since its experts have work. Every rank prints how many tokens it
made, what a step took, and whether both loops made the same bits. The times mean something where
each rank has a core of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

import tokenyard

EXPERTS, TOPK, HIDDEN, SEQUENCES, STEPS = 16, 4, 512, 8, 200

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    group = tokenyard.local_group()  # of torchrun, or this process alone
    with tokenyard.Buffer(group) as buffer, torch.inference_mode():
        generator = torch.Generator().manual_seed(0)
        router = torch.randn(HIDDEN, EXPERTS, generator=generator)
        weights = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator).bfloat16() / 32
        mine = weights[buffer.get_local_experts(EXPERTS)]
        step = buffer.prepare(
            max_tokens=SEQUENCES, hidden=HIDDEN, num_topk=TOPK, num_experts=EXPERTS
        )

        def prepared(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
            rows = step.dispatch(x, topk_idx, topk_weights)
            return step.combine(grouped_mm(rows.x, mine, offs=rows.offsets))

        def ordinary(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
            got = buffer.dispatch_by_expert(x, topk_idx, topk_weights, num_experts=EXPERTS)
            assert isinstance(got.x, Tensor)  # and not FP8 with its scales
            return buffer.combine_by_expert(grouped_mm(got.x, mine, offs=got.offsets), got.handle)

        decode(buffer.rank, router, prepared), decode(buffer.rank, router, ordinary)  # compile
        ours, seconds = decode(buffer.rank, router, prepared)
        want, ordinary_seconds = decode(buffer.rank, router, ordinary)
    same = len(ours) == len(want) and all(map(torch.equal, ours, want))
    print(
        f"rank {group.rank()}: {sum(map(len, ours))} tokens in {STEPS} steps, "
        f"{seconds / STEPS * 1e6:.0f} us a step prepared, {ordinary_seconds / STEPS * 1e6:.0f} us "
        f"with the ordinary calls; the same bits: {same}",
        flush=True,
    )
    assert same


def decode(rank: int, router: Tensor, layer: Layer) -> tuple[list[Tensor], float]:
    """What each step makes of this rank's tokens, and the seconds of all steps."""
    x = torch.randn(SEQUENCES, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    made = []
    began = time.perf_counter()
    for n in range(STEPS):
        alive = SEQUENCES - n * (SEQUENCES + 1) // (STEPS - 50 * (rank % 2))
        x = x[: max(alive, 0)]  # of sequences that have not ended
        topk_weights, topk_idx = (x.float() @ router).softmax(1).topk(TOPK)
        x = torch.nn.functional.rms_norm(x + layer(x, topk_idx, topk_weights), (HIDDEN,))
        made.append(x)  # sums are the caller's: they stay as they are
    return made, time.perf_counter() - began


if __name__ == "__main__":
    main()
