"""What happens inside one rank, one thread: layout, align, permute and FP8, beside torch."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tokenyard import spec
from tokenyard.ops.permute import unpermute_backward
from tokenyard.testing import layout_of, routing
from tokenyard.tools.bench.baselines import MEMCPY, memory_ways
from tokenyard.tools.bench.case import Case, Check, Way
from tokenyard.tools.bench.shape import Shape

TORCH = "torch"
_SPEC_TOKENS = 256  # more of them would take the specification long
_LOCAL = 2  # of a row's experts are here, in permute's benchmark


def torch_layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> list[Tensor]:
    """Counts per rank and per expert, and marks, for experts spread evenly."""
    per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
    rank = torch.where(topk_idx >= 0, topk_idx // (num_experts // num_ranks), num_ranks)
    marks = torch.zeros(len(topk_idx), num_ranks + 1, dtype=torch.bool).scatter_(1, rank, True)
    in_rank = marks[:, :num_ranks].contiguous()
    return [in_rank.sum(0).int(), per_expert, in_rank]


def layout(group: Any, shape: Shape, tokens: int) -> Generator[Case]:
    num_ranks = 8
    experts = max(shape.experts // num_ranks, 1) * num_ranks
    idx = routing("uniform", tokens, shape.topk, experts)[0]

    def checks() -> list[Check]:
        found = []
        world = spec.World.even(experts, num_ranks)
        want = spec.layout(idx[:_SPEC_TOKENS], world)
        for got, wanted, whose in (
            (layout_of(idx[:_SPEC_TOKENS], experts, num_ranks), want, "the specification's"),
            (layout_of(idx, experts, num_ranks), None, "torch's"),
        ):
            mine = [got.num_tokens_per_rank, got.num_tokens_per_expert, got.is_token_in_rank]
            other = torch_layout(idx, experts, num_ranks)
            if wanted is not None:
                other = [wanted.num_tokens_per_rank, wanted.num_tokens_per_expert]
                other.append(wanted.is_token_in_rank)
            found.append((f"layout, beside {whose}", mine, other))
        return found

    yield Case(
        label=f"{tokens} tokens, {num_ranks} ranks",
        ours={"layout": Way(lambda: layout_of(idx, experts, num_ranks))},
        beside={TORCH: Way(lambda: torch_layout(idx, experts, num_ranks))},
        checks=checks,
        base=TORCH,
    )


def torch_align(topk_ids: Tensor, block_size: int, num_experts: int) -> list[Tensor]:
    """What is in use of the three results, where no id is -1."""
    ids, order = topk_ids.flatten().sort(stable=True)
    counts = torch.bincount(ids, minlength=num_experts)
    blocks = (counts + block_size - 1) // block_size
    ends = (blocks * block_size).cumsum(0)
    shift = ends - blocks * block_size - (counts.cumsum(0) - counts)
    entries = torch.full((int(ends[-1]),), ids.numel(), dtype=torch.int32)
    entries[torch.arange(ids.numel()) + shift[ids]] = order.int()
    owners = torch.arange(num_experts, dtype=torch.int32).repeat_interleave(blocks)
    return [entries, owners, ends[-1:].int()]


def align(group: Any, shape: Shape, tokens: int) -> Generator[Case]:
    block_size = 64 if tokens < 1024 else 128
    ids = routing("uniform", tokens, shape.topk, shape.experts)[0].int()

    def ours(ids: Tensor = ids) -> Any:
        return tokenyard.moe_align_block_size(ids, block_size, shape.experts)

    def theirs() -> list[Tensor]:
        return torch_align(ids, block_size, shape.experts)

    def checks() -> list[Check]:
        part = ids[:_SPEC_TOKENS]
        want = spec.moe_align_block_size(part, block_size, shape.experts)
        used = int(want.num_tokens_post_pad)
        got = ours(part)
        beside = theirs()
        return [
            ("entries", got[0][:used], want.sorted_token_ids[:used]),
            ("owners of blocks", got[1], want.expert_ids),
            ("entries in use", got[2], want.num_tokens_post_pad),
            (
                "align, beside torch's",
                [one[: len(other)] for one, other in zip(ours(), beside)],
                beside,
            ),
        ]

    yield Case(
        label=f"{tokens} tokens, blocks of {block_size}",
        ours={"moe_align_block_size": Way(ours)},
        beside={TORCH: Way(theirs)},
        checks=checks,
        base=TORCH,
    )


def torch_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.view(x.shape[0], -1, 128)
    amax = groups.abs().float().amax(dim=2).clamp(1e-4)
    values = (groups * (448.0 / amax.unsqueeze(2))).to(torch.float8_e4m3fn)
    return values.view(x.shape), amax / 448.0


def torch_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    groups = x_fp8.float().view(x_fp8.shape[0], -1, 128)
    return (groups * x_scales.unsqueeze(2)).view(x_fp8.shape).bfloat16()


def fp8(group: Any, shape: Shape, tokens: int) -> Generator[Case]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, shape.hidden, generator=generator).bfloat16()
    pair = tokenyard.per_token_cast_to_fp8(x)

    def checks() -> list[Check]:
        return [
            ("FP8 rows, by the specification", pair[0][:1], spec.cast_to_fp8(x[:1])[0]),
            ("FP8 rows, beside torch's", list(pair), list(torch_to_fp8(x))),
            ("rows cast back", tokenyard.per_token_cast_back(*pair), torch_back(*pair)),
        ]

    yield Case(
        label=f"{tokens} tokens to FP8",
        ours={"per_token_cast_to_fp8": Way(lambda: tokenyard.per_token_cast_to_fp8(x))},
        beside={TORCH: Way(lambda: torch_to_fp8(x))},
        checks=checks,
        base=TORCH,
        num_bytes=x.nbytes,
    )
    yield Case(
        label=f"{tokens} tokens back",
        ours={"per_token_cast_back": Way(lambda: tokenyard.per_token_cast_back(*pair))},
        beside={TORCH: Way(lambda: torch_back(*pair))},
        checks=checks,
        base=TORCH,
        num_bytes=x.nbytes,
    )


def routed_here(num_rows: int, topk: int, num_local: int) -> Tensor:
    """[N, K] local ids, num_local of each row's here, the others elsewhere."""
    generator = torch.Generator().manual_seed(0)
    here = torch.rand(num_rows, topk, generator=generator).topk(num_local).indices
    ids = torch.rand(num_rows, topk, generator=generator).topk(num_local).indices
    return torch.full((num_rows, topk), -1).scatter_(1, here, ids)


def torch_permute(x: Tensor, topk_idx: Tensor, num_experts: int) -> list[Tensor]:
    ids, order = topk_idx.flatten().sort(stable=True)
    pairs = order[ids >= 0]
    row_of = torch.full((topk_idx.numel(),), -1)
    row_of[pairs] = torch.arange(len(pairs))
    ends = torch.bincount(ids[ids >= 0], minlength=num_experts).cumsum(0).int()
    return [x.index_select(0, pairs // topk_idx.shape[1]), row_of.view(topk_idx.shape), ends]


def torch_unpermute(y: Tensor, row_of: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros(len(row_of), y.shape[1])
    for k, places in enumerate(row_of.unbind(1)):
        (rows,) = (places >= 0).nonzero(as_tuple=True)
        total.index_add_(0, rows, weights[rows, k, None] * y.index_select(0, places[rows]))
    return total.to(y.dtype)


def permute(group: Any, shape: Shape, tokens: int) -> Generator[Case]:
    """memcpy copies as many bytes as permute and unpermute move together."""
    experts = shape.topk
    x = torch.randn(tokens, shape.hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    idx = routed_here(tokens, shape.topk, min(_LOCAL, shape.topk))
    weights = routing("uniform", tokens, shape.topk, experts)[1]
    got = tokenyard.permute(x, idx, experts)
    there, back = torch.zeros_like(got.x), torch.zeros_like(x)

    def both(into: bool) -> Tensor:
        rows = tokenyard.permute(x, idx, experts, out=there if into else None)
        out = back if into else None
        return tokenyard.unpermute(rows.x, rows.row_of, weights=weights, out=out)

    def theirs() -> Tensor:
        rows, row_of, _ = torch_permute(x, idx, experts)
        return torch_unpermute(rows, row_of, weights)

    def checks() -> list[Check]:
        few = tokenyard.permute(x[:64], idx[:64], experts)
        want = spec.permute(x[:64], idx[:64], experts)
        mine = [got.x, got.row_of, got.offsets]
        return [
            ("permuted rows, by the specification", few.x, want.x),
            ("permuted rows, beside torch's", mine, torch_permute(x, idx, experts)),
            ("sums", both(False), theirs()),
            ("sums, into memory given", both(True), theirs()),
        ]

    needed = x, got.x, got.row_of, weights
    num_bytes = 2 * got.x.nbytes
    yield Case(
        label=f"{tokens} rows, {min(_LOCAL, shape.topk)} local experts each",
        ours={
            "permute": Way(lambda: tokenyard.permute(x, idx, experts)),
            "unpermute": Way(lambda: tokenyard.unpermute(got.x, got.row_of, weights=weights)),
            "both": Way(lambda: both(False)),
            "both, out=": Way(lambda: both(True)),
            "gradients of unpermute": Way(lambda: unpermute_backward(*needed)),
        },
        beside={MEMCPY: memory_ways(num_bytes)[MEMCPY], "both, torch": Way(theirs)},
        checks=checks,
        base=MEMCPY,
        num_bytes=num_bytes,
    )
