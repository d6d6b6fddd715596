"""What ranks send in a benchmark, and what the specification says of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenyard import spec
from tokenyard.testing import numbered_tokens, routing
from tokenyard.tools.bench.case import Check
from tokenyard.tools.bench.shape import Shape

MOST_SPEC_TOKENS = 64  # of a rank: the specification is slow on purpose


class Routed:
    """Tokens and routing of this rank. Those of all ranks follow from their numbers alone."""

    def __init__(self, rank: int, shape: Shape, tokens: int) -> None:
        self.rank, self.shape, self.tokens = rank, shape, tokens
        self.x, self.idx, self.weights = self.of(rank)

    def of(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        x = numbered_tokens(self.tokens, shape.hidden, first=rank * self.tokens)
        return x, *routing("uniform", self.tokens, shape.topk, shape.experts, seed=rank)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of Buffer.dispatch and dispatch_by_expert, beside x."""
        return {
            "topk_idx": self.idx,
            "topk_weights": self.weights,
            "num_experts": self.shape.experts,
        }

    @property
    def row_bytes(self) -> int:
        return self.shape.hidden * self.x.element_size()


def few(routed: Routed) -> Routed:
    """A routing of no more tokens than the specification can take."""
    if routed.tokens <= MOST_SPEC_TOKENS:
        return routed
    return Routed(routed.rank, routed.shape, MOST_SPEC_TOKENS)


class Wanted:
    """What every call must bring to this rank, by the specification."""

    def __init__(self, routed: Routed) -> None:
        self.routed = routed
        shape = routed.shape
        self.world = spec.World.even(shape.experts, shape.ranks)
        each = [routed.of(rank) for rank in range(shape.ranks)]
        self.xs, self.idxs, self.weights = ([one[i] for one in each] for i in range(3))
        self.layouts = [spec.layout(idx, self.world) for idx in self.idxs]

    def exchange(self, buffer: Any) -> list[Check]:
        """Dispatch and combine, with experts that do nothing."""
        routed, rank = self.routed, self.routed.rank
        got = buffer.dispatch(routed.x, **routed.arguments)
        want = spec.dispatch(
            self.xs, self.layouts, self.world, topk_idxs=self.idxs, topk_weights=self.weights
        )
        rows = got.recv_x.clone()
        sums = buffer.combine(rows, got.handle).x
        want_sums = spec.combine([one.x for one in want], self.layouts, self.world)
        mine = want[rank]
        return [
            ("dispatched rows", rows, mine.x),
            ("dispatched experts", got.recv_topk_idx, mine.topk_idx),
            ("dispatched weights", got.recv_topk_weights, mine.topk_weights),
            (
                "rows of each expert",
                got.num_recv_tokens_per_expert_list,
                mine.num_tokens_per_expert,
            ),
            ("combined sums", sums, want_sums[rank]),
        ]

    def by_expert(self, buffer: Any, weigh: bool = True) -> list[Check]:
        routed, rank = self.routed, self.routed.rank
        got = buffer.dispatch_by_expert(routed.x, **routed.arguments)
        want = spec.dispatch_by_expert(self.xs, self.idxs, self.world)
        rows, offsets = got.x.clone(), got.offsets.clone()
        sums = buffer.combine_by_expert(got.x, got.handle, weigh=weigh)
        want_sums = spec.combine_by_expert(
            [one.x for one in want],
            want,
            self.idxs,
            self.world,
            topk_weights=self.weights if weigh else None,
        )
        return [
            ("rows by expert", rows, want[rank].x),
            ("ends of experts", offsets, want[rank].offsets),
            ("sums of rows by expert", sums, want_sums[rank]),
        ]

    def low_latency(self, buffer: Any) -> list[Check]:
        """Check calls of bfloat16, whatever is timed: FP8 rows are summed as they were received."""
        routed, rank = self.routed, self.routed.rank
        num_max = routed.tokens
        got = buffer.low_latency_dispatch(
            routed.x, routed.idx, num_max, routed.shape.experts, use_fp8=False
        )
        want = spec.low_latency_dispatch(self.xs, self.idxs, self.world, num_max)
        filled = [
            got.recv_x[local, :count].clone() for local, count in enumerate(got.recv_count.tolist())
        ]
        sums = buffer.low_latency_combine(
            got.recv_x, routed.idx, routed.weights, got.handle
        ).combined_x
        want_sums = spec.low_latency_combine(
            [one.x for one in want], self.idxs, self.weights, want, self.world
        )
        mine = want[rank]
        return [
            ("rows of each expert", got.recv_count, mine.count),
            (
                "low-latency rows",
                torch.cat(filled),
                torch.cat([x[:n] for x, n in zip(mine.x, mine.count.tolist())]),
            ),
            ("low-latency sums", sums, want_sums[rank]),
        ]
