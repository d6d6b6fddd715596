"""How callers of DeepEP V1 keep handles until backward: as tuples, and past their Buffer's end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tokenyard
from tokenyard.compat import v1_tuple
from tokenyard.testing import assert_same, routing

NUM_EXPERTS, NUM_TOPK = 4, 2


class Way:
    """Options of the calls of one way of training: how they end, and who counts."""

    def __init__(self, buffer: tokenyard.Buffer, later: bool, counted: bool) -> None:
        self.buffer, self.counted = buffer, counted
        self.how: dict[str, Any] = {"async_finish": later, "allocate_on_comm_stream": later}

    def routing(self, topk_idx: Tensor) -> dict[str, Any]:
        """Without counts few tokens take the compiled way."""
        if not self.counted:
            return {"num_experts": NUM_EXPERTS}
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
        return {
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_expert": per_expert,
            "is_token_in_rank": in_rank,
        }


class Dispatch(torch.autograd.Function):
    """As XTuner writes it: the handle's tensors are what is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, topk_idx: Tensor, weights: Tensor, way: Way) -> Any:
        got = way.buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, **way.routing(topk_idx), **way.how
        )
        assert got.handle is not None
        ctx.save_for_backward(*got.handle)  # before the event, which XTuner waits for later
        ctx.way = way
        with got.event:
            pass
        return got.recv_x, tuple(got.handle)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        back = ctx.way.buffer.combine(grad, ctx.saved_tensors, **ctx.way.how)
        with back.event:
            pass
        return back.x, None, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, handle: tuple[Tensor, ...], way: Way) -> Any:
        ctx.save_for_backward(*handle)
        ctx.way = way
        back = way.buffer.combine(y, handle, **way.how)
        with back.event:
            pass
        return back.x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        got = ctx.way.buffer.dispatch(grad.contiguous(), handle=ctx.saved_tensors, **ctx.way.how)
        with got.event:
            pass
        return got.recv_x, None, None


def inputs(rank: int, hidden: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(100 * seed + rank)
    x = torch.randn(5 + rank, hidden)
    return x, *routing("uniform", 5 + rank, NUM_TOPK, NUM_EXPERTS, seed=10 * seed + rank)


def train_with_tuples(group: Any, options: dict[str, Any]) -> int:
    """Gradients of two layers whose handles are kept as tuples, against those of the handles."""
    with tokenyard.Buffer(group, **options) as buffer:
        for later in (False, True):
            for counted in (False, True):
                way = Way(buffer, later, counted)
                x, topk_idx, weights = inputs(buffer.rank, 24)
                first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
                outs = []
                for one in (first, second):
                    got, handle = Dispatch.apply(one, topk_idx, weights, way)
                    outs.append(Combine.apply(got * 2, handle, way))
                    del got, handle
                grad = torch.randn(x.shape)
                (outs[0] * grad).sum().backward()
                (outs[1] * grad).sum().backward()
                want = expected_gradient(buffer, x, topk_idx, weights, grad)
                assert first.grad is not None
                assert second.grad is not None
                assert_same(first.grad, want, "gradient")
                assert_same(second.grad, want, "gradient of the second layer")
                del outs, first, second
    return v1_tuple.num_issued()


def expected_gradient(
    buffer: tokenyard.Buffer, x: Tensor, topk_idx: Tensor, weights: Tensor, grad: Tensor
) -> Tensor:
    """With the handle itself."""
    got: Any = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=NUM_EXPERTS)
    rows: Any = buffer.dispatch(grad, handle=got.handle).recv_x
    return buffer.combine(rows * 2, got.handle).x


def replace_buffers(group: Any, options: dict[str, Any], destroy: bool) -> None:
    """As Megatron's get_buffer: a Buffer that is too small gives way to a larger one, while handles
    of the old one wait for backward.
    """
    buffer: tokenyard.Buffer | None = None
    kept = []
    for layer, hidden in enumerate((8, 32, 128)):
        if destroy and buffer is not None:
            buffer.destroy()
        buffer = tokenyard.Buffer(group, num_nvl_bytes=1 << (20 + layer), **options)
        x, topk_idx, weights = inputs(buffer.rank, hidden, layer)
        for later in (False, True):
            got: Any = buffer.dispatch(
                x,
                topk_idx=topk_idx,
                topk_weights=weights,
                num_experts=NUM_EXPERTS,
                async_finish=later,
            )
            with got.event:
                pass
            kept.append((x, got.handle, got.recv_x, topk_idx, weights))
    assert buffer is not None
    with buffer:
        for x, handle, recv_x, topk_idx, weights in reversed(kept):
            again: Any = buffer.dispatch(
                x, topk_idx=topk_idx, topk_weights=weights, num_experts=NUM_EXPERTS
            )
            want = buffer.combine(recv_x, again.handle).x
            assert_same(buffer.combine(recv_x, handle).x, want, "combined")
            assert_same(buffer.combine(recv_x, tuple(handle)).x, want, "combined by a tuple")
            assert_same(buffer.dispatch(x, handle=handle).recv_x, recv_x, "dispatched")
            rows = buffer.get_next_combine_buffer(handle).copy_(recv_x)
            late = buffer.combine(rows, handle, topk_weights=again.recv_topk_weights)
            assert_same(late.x, want, "combined from the Buffer's memory")


def different_buffers(group: Any, options: dict[str, Any]) -> list[str]:
    """Handles of two Buffers and one call number: ranks that mix them are told."""
    told = []
    with (
        tokenyard.Buffer(group, **options) as one,
        tokenyard.Buffer(group, **options) as two,
        tokenyard.Buffer(group, **options) as three,
    ):
        x, topk_idx, weights = inputs(one.rank, 8)
        made = [
            buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=NUM_EXPERTS)
            for buffer in (one, two, three)
        ]
        for mixed in ((0, 1), (2, 1)):
            got: Any = made[mixed[one.rank % 2]]
            try:
                three.combine(got.recv_x, got.handle)
            except tokenyard.CallMismatch as error:
                told.append(str(error))
        last: Any = made[2]
        three.combine(last.recv_x, last.handle)
    return told


def by_expert_elsewhere(group: Any, options: dict[str, Any]) -> None:
    """Rows by expert, and all_gather, with handles of another Buffer."""
    with tokenyard.Buffer(group, **options) as old:
        x, topk_idx, weights = inputs(old.rank, 16)
        got = old.dispatch_by_expert(x, topk_idx, weights, num_experts=NUM_EXPERTS)
        rows: Any = got.x
        want = old.combine_by_expert(rows, got.handle)
        gathered = old.all_gather(x)
    with tokenyard.Buffer(group, **options) as buffer:
        assert_same(buffer.combine_by_expert(rows, got.handle), want, "by expert")
        again = buffer.all_gather(x, gathered.handle)
        assert_same(again.x, gathered.x, "gathered")
