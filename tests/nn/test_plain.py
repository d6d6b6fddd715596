"""Transforms of torch.func and meta tensors: refused with words, or shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import tokenyard
from tokenyard.nn import MoE, RouterConfig, functional
from tokenyard.testing import run_virtual

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
TOPK_IDX = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]])
TOPK_WEIGHTS = torch.full((6, 2), 0.5)
OFFSETS = torch.tensor([1, 2, 4, 6], dtype=torch.int32)
ROW_OF = torch.arange(12).reshape(6, 2)
MATRICES = torch.ones(4, 16, 8)
Call = Callable[[Tensor], Tensor]


def calls(buffer: tokenyard.Buffer) -> dict[str, Call]:
    """A function of one tensor [6, 16] for each of `nn.functional`."""
    rows = functional.dispatch(buffer, X, TOPK_IDX, TOPK_WEIGHTS, 4)
    return {
        "dispatch": lambda x: functional.dispatch(buffer, x, TOPK_IDX, TOPK_WEIGHTS, 4).x,
        "combine": lambda x: functional.combine(buffer, x, rows),
        "permute": lambda x: functional.permute(x, TOPK_IDX, 4).x,
        "unpermute": lambda x: functional.unpermute(x.repeat(2, 1), ROW_OF, TOPK_WEIGHTS),
        "grouped_mm": lambda x: functional.grouped_mm(x, MATRICES, OFFSETS),
        "sum_over_ranks": lambda x: functional.sum_over_ranks(buffer, x[0]),
    }


def layer(buffer: tokenyard.Buffer, **more: Any) -> MoE:
    return MoE(buffer, 16, 8, RouterConfig(num_experts=4, num_topk=2), **more)


def with_tangent(call: Call) -> None:
    with forward_ad.dual_level():
        call(forward_ad.make_dual(X, X))


TRANSFORMS: dict[str, tuple[Callable[[Call], Any], str]] = {
    "vmap": (
        lambda call: torch.vmap(call)(X[None]),
        " does not work inside torch.vmap: want a loop over the samples, or one call with all",
    ),
    "grad": (
        lambda call: torch.func.grad(lambda x: call(x).sum())(X),
        " does not work inside torch.func.grad, vjp or jacrev: want torch.autograd.grad",
    ),
    "jvp": (
        lambda call: torch.func.jvp(call, (X,), (X,)),
        " does not work inside torch.func.jvp: want torch.autograd.grad",
    ),
    "forward-mode": (with_tangent, " has a tangent: want torch.autograd.grad"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, of forward mode
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused(transform: str) -> None:
    apply, message = TRANSFORMS[transform]

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            every: list[tuple[str, Call]] = [*calls(buffer).items(), ("dispatch", layer(buffer))]
            for name, call in every:
                with pytest.raises(NotImplementedError) as caught:
                    apply(call)
                assert str(caught.value).startswith(name)
                assert str(caught.value).endswith(message)

    run_virtual(job, 1)


def test_batched_gradients_pass() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            x = X.clone().requires_grad_()
            out = layer(buffer)(x)
            vectors = torch.stack([torch.ones_like(out), 2 * torch.ones_like(out)])
            (got,) = torch.autograd.grad(out, x, vectors, is_grads_batched=True, retain_graph=True)
            (want,) = torch.autograd.grad(out, x, vectors[0])
            torch.testing.assert_close(got[0], want)
            torch.testing.assert_close(got[1], 2 * want)

    run_virtual(job, 1)


def test_meta_tensors_give_shapes() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            x = X.to("meta")
            out = layer(buffer, num_worst_tokens=8, device="meta")(x)
            assert out.is_meta
            assert out.shape == x.shape

    run_virtual(job, 1)


META: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dispatch": (
        lambda buffer: layer(buffer, device="meta")(X.to("meta")),
        "dispatch_by_expert: x is on meta, and how many rows come depends on values, want dispatch "
        "with num_worst_tokens",
    ),
    "permute": (
        lambda buffer: functional.permute(X.to("meta"), TOPK_IDX.to("meta"), 4),
        "permute: x is on meta, and how many rows come depends on values, want num_rows",
    ),
    "mixed": (
        lambda buffer: functional.dispatch(buffer, X.to("meta"), TOPK_IDX, TOPK_WEIGHTS, 4),
        "dispatch: x is on meta and topk_idx on cpu, want all on meta or none",
    ),
    "parameters": (
        lambda buffer: functional.grouped_mm(X, MATRICES.to("meta"), OFFSETS),
        "grouped_mm: x is on cpu and weights on meta, want all on meta or none",
    ),
}


@pytest.mark.parametrize("case", META)
def test_meta_tensors_are_refused(case: str) -> None:
    call, message = META[case]

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            call(buffer)

    with pytest.raises((ValueError, NotImplementedError)) as caught:
        run_virtual(job, 1)
    assert str(caught.value) == message
