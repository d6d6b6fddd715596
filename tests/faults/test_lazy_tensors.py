"""Tensors whose memory does not hold what they mean: torch's negative bit, or no memory at all.

Kernels read addresses. So the first are resolved and the second refused, before ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tokenyard.ops.permute import unpermute_backward
from tokenyard.testing import Processes

HIDDEN = 128
IDX, WEIGHTS = torch.tensor([[0], [1], [0], [1]]), torch.ones(4, 1)


def negated(value: Tensor) -> Tensor:
    """The same values, as the negative of what the memory holds."""
    return torch._neg_view(-value)


def local_results(lazy: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    got = tokenyard.permute(lazy(x), lazy(IDX), 2)
    scaled = tokenyard.permute((lazy(x), lazy(WEIGHTS)), lazy(IDX), 2)
    grads = unpermute_backward(lazy(x), lazy(got.x), got.row_of, lazy(WEIGHTS))
    turned = torch.empty(HIDDEN, 4)
    tokenyard.rearrange(turned, lazy(x).t())
    return [
        got.x,
        scaled.scales,
        tokenyard.unpermute(lazy(got.x), lazy(got.row_of), weights=lazy(WEIGHTS)),
        *grads,
        turned,
        *tokenyard.per_token_cast_to_fp8(lazy(x)),
        tokenyard.per_token_cast_back(torch.ones(4, HIDDEN).to(torch.float8_e4m3fn), lazy(WEIGHTS)),
        *tokenyard.moe_align_block_size(lazy(IDX), 2, 2),
    ]


def exchanged(buffer: tokenyard.Buffer, lazy: Callable[[Tensor], Tensor]) -> list[Tensor]:
    rank = buffer.rank
    x = torch.arange(4.0 * HIDDEN).view(4, HIDDEN) + 1000 * rank
    got: Any = buffer.dispatch(
        lazy(x), topk_idx=lazy(IDX), topk_weights=lazy(WEIGHTS), num_experts=2
    )
    back = buffer.combine(lazy(got.recv_x), got.handle, bias=lazy(x))
    low: Any = buffer.low_latency_dispatch(lazy(x), lazy(IDX), 4, 2, use_fp8=False)
    rows = torch.where(torch.isnan(low.recv_x), 0, low.recv_x)
    total = buffer.low_latency_combine(lazy(rows), lazy(IDX), lazy(WEIGHTS), low.handle)
    return [got.recv_x, got.recv_topk_weights, back.x, total.combined_x]


def job(group: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Lazy tensors on rank 0 alone, then none."""
    lazy = negated if group.rank() == 0 else torch.clone
    with tokenyard.Buffer(
        group, num_rdma_bytes=1 << 20, low_latency_mode=True, timeout=scaled(60)
    ) as one:
        return exchanged(one, lazy), exchanged(one, torch.clone)


def test_local_functions_see_the_negative_bit() -> None:
    for got, want in zip(local_results(negated), local_results(torch.clone), strict=True):
        assert torch.equal(got.double(), want.double())


@pytest.mark.processes
def test_exchanges_see_the_negative_bit(two_processes: Processes) -> None:
    for lazy, plain in two_processes.run(job):
        for got, want in zip(lazy, plain, strict=True):
            assert torch.equal(got, want)


def test_results_are_not_written_beneath_the_negative_bit() -> None:
    out = torch._neg_view(torch.zeros(4, HIDDEN))
    with pytest.raises(ValueError, match="out is not what its memory holds, want"):
        tokenyard.permute(torch.ones(4, HIDDEN), IDX, 2, out=out)
    out = torch._neg_view(torch.zeros(4, HIDDEN))
    with pytest.raises(ValueError, match="out is not what its memory holds, want"):
        tokenyard.unpermute(torch.ones(4, HIDDEN), IDX, out=out)


def freed(value: Tensor) -> Tensor:
    """As FSDP leaves parameters between uses."""
    value = value.clone()
    value.untyped_storage().resize_(0)
    return value


def lacking(group: Any) -> list[str]:
    """What is said of tensors without memory, by each function; on rank 1 they are whole. All of
    them are like tensors of a call before.
    """
    x = torch.ones(4, HIDDEN)
    said = []
    with tokenyard.Buffer(
        group, num_rdma_bytes=1 << 20, low_latency_mode=True, timeout=scaled(60)
    ) as one:
        lazy = freed if group.rank() == 0 else torch.clone
        low: Any = one.low_latency_dispatch(x, IDX, 4, 2, use_fp8=False)
        step = one.prepare(max_tokens=4, hidden=HIDDEN, num_topk=1, num_experts=2, dtype=x.dtype)
        one.dispatch(x, topk_idx=IDX, topk_weights=WEIGHTS, num_experts=2)
        one.dispatch_by_expert(x, IDX, WEIGHTS, num_experts=2)
        step.dispatch(x, IDX, WEIGHTS)
        calls: list[Callable[[], Any]] = [
            lambda: one.dispatch(lazy(x), topk_idx=IDX, topk_weights=WEIGHTS, num_experts=2),
            lambda: one.dispatch(x, topk_idx=lazy(IDX), topk_weights=WEIGHTS, num_experts=2),
            lambda: one.dispatch_by_expert(x, IDX, lazy(WEIGHTS), num_experts=2),
            lambda: step.dispatch(x, IDX, lazy(WEIGHTS)),
            lambda: one.low_latency_dispatch(lazy(x), IDX, 4, 2, use_fp8=False),
            lambda: one.low_latency_combine(lazy(low.recv_x), IDX, WEIGHTS, low.handle),
            lambda: tokenyard.permute(freed(x), IDX, 2),
            lambda: tokenyard.per_token_cast_to_fp8(freed(x)),
            lambda: tokenyard.moe_align_block_size(freed(IDX), 2, 2),
            lambda: tokenyard.rearrange(torch.empty(4, HIDDEN), freed(x)),
        ]
        for call in calls:
            with pytest.raises(ValueError) as caught:
                call()
            said.append(str(caught.value))
    return said


@pytest.mark.processes
def test_tensors_without_memory_are_refused(two_processes: Processes) -> None:
    for said in two_processes.run(lacking):
        assert len(said) == 10
        for text in said:
            assert "has no memory of its own" in text
    assert said[0].startswith("rank 0 rejected its input")


def test_tensors_of_transforms_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"does not work inside torch\.vmap: want"):
        torch.func.vmap(lambda x: tokenyard.permute(x, IDX, 2).x)(torch.ones(2, 4, HIDDEN))
    functional = torch._to_functional_tensor(torch.ones(4, HIDDEN))
    with pytest.raises(ValueError, match="x has no memory of its own, want"):
        tokenyard.permute(functional, IDX, 2)
