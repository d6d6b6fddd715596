"""Gradients of nn.functional: by differences over all ranks at once, and against `spec` by bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.lanes import at_night
from tests.cases.nn import exchange as jobs
from tokenyard import spec
from tokenyard.nn import functional as tf
from tokenyard.testing import (
    ROUTINGS,
    Processes,
    assert_same,
    numbered_tokens,
    routing,
    run_virtual,
)

Run = Callable[..., list[Any]]


def virtual(num_ranks: int) -> Run:
    return lambda job, *args: run_virtual(job, num_ranks, *args).results


class AllRanks(torch.autograd.Function):
    """A function of all ranks' inputs, all ranks' outputs one after the other.

    Its backward pass is what the ranks do together. gradcheck can then move any rank's input and
    look at any rank's output, which no rank could do alone.
    """

    @staticmethod
    def forward(ctx: Any, run: Run, name: str, transport: str, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        outs = run(jobs.evaluate, name, list(inputs), transport)
        ctx.run, ctx.name, ctx.transport = run, name, transport
        ctx.lengths, ctx.width = [len(out) for out in outs], outs[0].shape[1]
        return torch.cat([out.flatten() for out in outs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads = list(grad.view(-1, ctx.width).split(ctx.lengths))
        inputs = list(ctx.saved_tensors)
        return None, None, None, *ctx.run(jobs.pull_back, ctx.name, inputs, grads, ctx.transport)


def given(name: str, num_ranks: int, arriving: list[int]) -> list[Tensor]:
    """Multiples of 1/8, so that float32 weights and steps of 1/4 are exact."""
    lengths = arriving if name == "combined" else jobs.TOKENS[:num_ranks]
    width = {"dispatched_weights": 3, "combined": 2, "dispatched_x": 2}.get(name, 4)
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randint(-8, 9, (length, width), generator=generator).double() / 8).requires_grad_()
        for length in lengths
    ]


def check(run: Run, num_ranks: int, name: str, transport: str = "auto") -> None:
    inputs = given(name, num_ranks, run(jobs.sizes))
    assert all(len(one) for one in inputs)
    # All but the layer are linear, for which a large step is exact; its weights are float32.
    eps, atol = (1e-2, 2e-3) if name.startswith("layer") else (0.25, 1e-12)
    torch.autograd.gradcheck(
        lambda *xs: AllRanks.apply(run, name, transport, *xs), inputs, eps=eps, atol=atol, rtol=1e-3
    )


OF_ALL = ("dispatched_both", "combined", "layer", "layer_by_expert")  # what has the others in it
NAMES = (
    "dispatched_x",
    "dispatched_weights",
    "dispatched_both",
    "combined",
    "layer",
    "dispatched_by_expert",
    "layer_by_expert",
)


@pytest.mark.parametrize("name", at_night(NAMES, gate=OF_ALL))
def test_gradcheck_on_virtual_ranks(name: str) -> None:
    check(virtual(3), 3, name)


@pytest.mark.processes
@pytest.mark.parametrize(
    "name, transport",
    [
        ("combined", "ring"),
        ("layer_by_expert", "direct"),
        pytest.param("dispatched_both", "direct", marks=pytest.mark.slow),
        pytest.param("dispatched_both", "collective", marks=pytest.mark.slow),
        pytest.param("combined", "direct", marks=pytest.mark.slow),
        pytest.param("combined", "collective", marks=pytest.mark.slow),
        pytest.param("dispatched_by_expert", "direct", marks=pytest.mark.slow),
        pytest.param("dispatched_by_expert", "collective", marks=pytest.mark.slow),
    ],
)
def test_gradcheck_on_processes(two_processes: Processes, name: str, transport: str) -> None:
    check(two_processes.run, 2, name, transport)


@pytest.mark.processes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("transport", ["direct", "collective"])
def test_rows_by_expert_have_the_gradients_of_permute(
    two_processes: Processes, transport: str, dtype: torch.dtype
) -> None:
    two_processes.run(jobs.same_by_expert, transport, dtype)


@pytest.mark.parametrize("moe", [jobs.moe, jobs.moe_by_expert], ids=["rows", "rows-by-expert"])
def test_gradients_of_gradients(moe: Callable[..., Tensor]) -> None:
    """Every rank checks its own: what comes back to a rank depends on that rank's x alone."""

    def job(group: Any) -> None:
        with jobs.open_buffer(group) as buffer:
            x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
            topk_idx, weights = jobs.routed(group.rank(), 2)
            matrices = jobs.expert_matrices(3, torch.float64)[group.rank() :: 2]

            def layer(x: Tensor) -> Tensor:
                return moe(buffer, x, topk_idx, weights, matrices)

            torch.autograd.gradcheck(layer, x)
            torch.autograd.gradgradcheck(layer, x)

    run_virtual(job, 2)


def test_gradients_of_gradients_of_weights() -> None:
    """By bits: rows and weights go there, back, and there again."""

    def job(group: Any) -> None:
        with jobs.open_buffer(group) as buffer:
            topk_idx, weights = jobs.routed(group.rank(), 5)
            x = torch.randn(5, 4, requires_grad=True)
            weights.requires_grad_()
            rows = tf.dispatch(buffer, x, topk_idx, weights, jobs.NUM_EXPERTS)
            seed_x = torch.randn(rows.x.shape, requires_grad=True)
            seed_w = torch.randn(rows.topk_weights.shape, requires_grad=True)
            grads = torch.autograd.grad(
                [rows.x, rows.topk_weights], [x, weights], [seed_x, seed_w], create_graph=True
            )
            twice = torch.autograd.grad(grads, [seed_x, seed_w], [x.detach(), weights.detach()])
            assert_same(twice[0], rows.x.detach())
            assert_same(twice[1], rows.topk_weights.detach())

    run_virtual(job, 3)


def local_case() -> tuple[Tensor, Tensor, Tensor]:
    topk_idx = torch.tensor([[1, -1, 0], [-1, -1, -1], [0, 2, 1], [2, -1, -1]])
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    return topk_idx, x, weights


@pytest.mark.parametrize("num_rows", [None, 20], ids=["as-many", "static"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_gradcheck_of_permute_and_unpermute(weighted: bool, num_rows: int | None) -> None:
    topk_idx, x, weights = local_case()

    def there_and_back(x: Tensor, weights: Tensor) -> Tensor:
        got = tf.permute(x, topk_idx, 3, expert_alignment=2, num_rows=num_rows)
        y = got.x.sin() * torch.arange(1, len(got.x) + 1)[:, None]
        return tf.unpermute(y, got.row_of, weights if weighted else None)

    args = (x, weights if weighted else weights.detach())
    torch.autograd.gradcheck(there_and_back, args)
    torch.autograd.gradgradcheck(there_and_back, args)


@pytest.mark.parametrize("width", [3, 4], ids=["loop", "torch"])
def test_gradcheck_of_grouped_mm(width: int) -> None:
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32)
    x = torch.randn(6, width, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(3, width, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(tf.grouped_mm, (x, matrices, offsets))
    torch.autograd.gradgradcheck(tf.grouped_mm, (x, matrices, offsets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_gradients_meet_the_specification(kind: str, dtype: torch.dtype) -> None:
    num_ranks, num_experts = 3, 6
    world = spec.World.even(num_experts, num_ranks)

    def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens = (5, 0, 9)[rank]
        x = numbered_tokens(num_tokens, 7, first=10 * rank, dtype=dtype)
        return x, *routing(kind, num_tokens, 3, num_experts, seed=rank)

    def job(group: Any) -> list[Tensor]:
        x, topk_idx, weights = inputs(group.rank())
        x.requires_grad_(), weights.requires_grad_()
        with tokenyard.Buffer(group) as buffer:
            rows = tf.dispatch(buffer, x, topk_idx, weights, num_experts)
            grad_rows = numbered_tokens(*rows.x.shape, first=50 * group.rank(), dtype=dtype)
            rows.x.backward(grad_rows)
            y = torch.zeros_like(rows.x, requires_grad=True)
            tf.combine(buffer, y, rows).backward(x.detach())
        return [grad_rows, x.grad, y.grad]

    results = run_virtual(job, num_ranks).results
    given = [inputs(rank) for rank in range(num_ranks)]
    layouts = [spec.layout(topk_idx, world) for _, topk_idx, _ in given]
    want_x = spec.dispatch_backward([one[0] for one in results], layouts, world)
    want_y = spec.combine_backward([x for x, _, _ in given], layouts, world)
    for rank, (_, grad_x, grad_y) in enumerate(results):
        assert_same(grad_x, want_x[rank], f"grad of x on rank {rank}")
        assert_same(grad_y, want_y[rank], f"grad of y on rank {rank}")
