"""Whatever defaults torch has around a call, the call gives the same bits, on CPU."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tests.cases.surroundings import AROUND, Around, Surrounded
from tokenyard.testing import assert_same, run_virtual
from tokenyard.testing import routing as random_routing

EXPERTS, TOPK, HIDDEN, TOKENS = 4, 2, 128, 6


@cache  # made before ranks run: a default dtype is one of all threads
def given(rank: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(rank))
    return x, *random_routing("holes", num_tokens, TOPK, EXPERTS, seed=rank)


def exchange(group: Any, around: Around, transport: str) -> list[Any]:
    """Every call of a Buffer, with tokens and with none, often enough for each way of a call."""
    told: list[Any] = []
    nodes = 1 if transport == "hierarchical" else None
    with around():
        buffer = tokenyard.Buffer(
            group, transport=transport, ranks_per_node=nodes, low_latency_mode=nodes is None
        )
    with buffer:
        calls = Surrounded(buffer, around)
        for num_tokens in (TOKENS, TOKENS, TOKENS, 0):
            x, ids, weights = given(group.rank(), num_tokens)
            told += calls.get_dispatch_layout(ids, EXPERTS)[:4]
            for later in (False, True):
                got = calls.dispatch(
                    x,
                    topk_idx=ids,
                    topk_weights=weights,
                    num_experts=EXPERTS,
                    async_finish=later,
                )
                if later:
                    got.event.current_stream_wait()
                handle = got.handle
                told += [got.recv_x, got.recv_topk_idx, got.recv_topk_weights]
                told += [handle.is_token_in_rank, handle.recv_src_idx, handle.send_head]
                told.append(calls.dispatch(x, handle).recv_x)
                rows = calls.get_next_combine_buffer(handle)
                with around():
                    rows.copy_(got.recv_x)
                told += calls.combine(rows, handle, got.recv_topk_weights)[:2]
            quantised = tokenyard.per_token_cast_to_fp8(x)
            got = calls.dispatch(quantised, topk_idx=ids, topk_weights=weights, num_experts=EXPERTS)
            told += got.recv_x
            sorted_rows = calls.dispatch_by_expert(x, ids, weights, num_experts=EXPERTS)
            told += [sorted_rows.x, sorted_rows.offsets]
            told.append(calls.combine_by_expert(sorted_rows.x, sorted_rows.handle))
            told.append(calls.all_gather(x).x)
            if nodes is None:
                for use_fp8 in (False, True):
                    low = calls.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=use_fp8)
                    told += [low.recv_count, low.handle[1]]
                    y = torch.ones(
                        low.handle[0].shape[0], low.handle[0].shape[1], HIDDEN, dtype=torch.float32
                    )
                    back = calls.low_latency_combine(y, ids, weights, low.handle)
                    told.append(back.combined_x)
    return told


def others(group: Any, around: Around) -> list[Any]:
    """Buffers of other interfaces."""
    x, ids, weights = given(group.rank(), TOKENS)
    told: list[Any] = []
    with around():
        elastic = tokenyard.ElasticBuffer(group, num_max_tokens_per_rank=TOKENS)
        hybrid = tokenyard.HybridEPBuffer(group, HIDDEN, TOKENS, EXPERTS // group.size())
    with elastic:
        calls = Surrounded(elastic, around)
        for expand in (False, True):
            got = calls.dispatch(x, ids, weights, num_experts=EXPERTS, do_expand=expand)
            told += [got.recv_x, calls.combine(got.recv_x, got.handle)[0]]
    calls = Surrounded(hybrid, around)
    got = calls.dispatch_with_permute(
        hidden=x, topk_idx=ids, topk_weights=weights, num_of_experts=EXPERTS
    )
    told += [got.hidden, got.tokens_per_expert]
    told.append(calls.combine_with_unpermute(hidden=got.hidden, handle=got.handle)[0])
    return told


def local(_: Any, around: Around) -> list[Any]:
    """Kernels around the exchange."""
    x, ids, weights = given(0, TOKENS)
    calls = Surrounded(tokenyard, around)
    made = calls.permute(x, ids, EXPERTS, expert_alignment=8)
    told = [made.x, made.row_of, made.offsets]
    told.append(calls.unpermute(made.x, made.row_of, weights=weights))
    told += calls.moe_align_block_size(ids.clamp(min=0), 16, EXPERTS)
    quantised = calls.per_token_cast_to_fp8(x)
    told += [*quantised, calls.per_token_cast_back(*quantised)]
    out = torch.empty(HIDDEN, TOKENS, dtype=torch.float32)
    calls.rearrange(out, x.T)
    told.append(out)
    return told


@pytest.mark.parametrize("name", [name for name in AROUND if name])
@pytest.mark.parametrize(
    "job, arguments",
    [
        (exchange, ("direct",)),
        (exchange, ("collective",)),
        (exchange, ("ring",)),
        (exchange, ("hierarchical",)),
        (others, ()),
        (local, ()),
    ],
    ids=["direct", "collective", "ring", "hierarchical", "others", "local"],
)
def test_defaults_of_torch_change_nothing(job: Any, arguments: tuple[str, ...], name: str) -> None:
    for rank, num_tokens in product((0, 1), (0, TOKENS)):
        given(rank, num_tokens)
    wanted = run_virtual(job, 2, nullcontext, *arguments, timeout=scaled(60)).results
    found = run_virtual(job, 2, AROUND[name], *arguments, timeout=scaled(60)).results
    for got, want in zip(found, wanted):
        assert_same(got, want)
