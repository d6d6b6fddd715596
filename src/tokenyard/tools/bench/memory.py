"""How much memory a benchmark takes on all of its ranks, before they are started.

A Buffer takes a small part (`tools.sizing`). The rest are rows that are kept to be compared,
what memcpy and the roof copy, and what gloo sends and sums in float32. `_HELD` counts these where a
benchmark holds most: how many times the rows of a rank, and so on. The counts were read off the
code and set by twelve runs of 1 to 7 GB, whose peaks they give to 10 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenyard.runtime import limits
from tokenyard.runtime.limits import NoMemory
from tokenyard.tools import sizing
from tokenyard.tools.bench.shape import Shape

PROCESS = 300_000_000  # bytes of a rank that holds no rows: torch, compiled kernels, gloo


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank holds beside a Buffer's own memory, in multiples of these."""

    tokens: float = 0.0  # of this rank
    all_tokens: float = 0.0  # of all ranks
    rows: float = 0.0  # that a dispatch brings to this rank
    by_expert: float = 0.0  # the same, once for each expert of a token
    slots: float = 0.0  # of the low-latency mode, one for every token of every rank at each expert


_HELD = {
    # rows: kept twice, a second result, 3 of memcpy and roof, gloo's 2 and 2 of its float32
    "dispatch": Held(rows=10.0, tokens=4.0),
    "combine": Held(rows=10.0, tokens=4.0),
    # rows, there and back: 6 of memcpy and roof, experts' output, gloo's 3 and 2 of its float32
    # The prepared ways: two blocks of all ranks' tokens, two parcels, rows by expert two times.
    "few": Held(rows=14.5, tokens=6.0, all_tokens=4.0, by_expert=4.5, slots=2.0),
    "sizes": Held(rows=20.0, tokens=40.0, by_expert=3.0),  # tokens of each size
    "low-latency": Held(rows=12.0, tokens=4.0, by_expert=3.0, slots=2.5),
    "by-expert": Held(rows=8.0, tokens=4.0, by_expert=4.0),
    "elastic": Held(rows=6.0, tokens=8.0, by_expert=6.0),
    # Rows that experts get, and their gradients; all ranks' tokens where they are gathered.
    "model": Held(all_tokens=6.0, by_expert=8.0),
}
_MOST_SLOTS = 512  # tokens up to which `few` measures the low-latency mode


def needed(name: str, shape: Shape) -> int:
    """Bytes that all ranks take where a benchmark holds most, about."""
    most = max(_of_rank(name, shape, tokens) for tokens in shape.tokens)
    return shape.ranks * (PROCESS + round(most))


def check(name: str, shape: Shape) -> None:
    """Raise NoMemory if the machine, or its cgroup, has less left than this takes."""
    wanted, left = needed(name, shape), limits.available()
    if wanted > left:
        raise NoMemory(
            f"{name} of {max(shape.tokens)} tokens on each of {shape.ranks} ranks takes about "
            f"{wanted / 2**30:.1f} GiB, {left / 2**30:.1f} GiB are free: "
            "lower ranks, tokens or hidden"
        )


def _of_rank(name: str, shape: Shape, tokens: int) -> float:
    work = sizing.Workload(
        num_tokens=tokens,
        hidden=shape.hidden,
        num_topk=shape.topk,
        num_experts=shape.experts,
        num_ranks=shape.ranks,
        dtype=torch.float32 if name == "model" else torch.bfloat16,
        # A Buffer refuses those that it does not know.
        transport=shape.transport if shape.transport in sizing.TRANSPORTS else "auto",
        low_latency=name == "low-latency",
    )
    held, own = _HELD[name], tokens * work.row_bytes
    slots = work.placement.most_experts * shape.ranks * own
    if name == "few" and tokens > _MOST_SLOTS:
        slots = 0
    return (
        sizing.total(sizing.parts(work))
        + held.tokens * own
        + held.all_tokens * shape.ranks * own
        + held.rows * work.even_rows * work.row_bytes
        + held.by_expert * shape.topk * own
        + held.slots * slots
    )
