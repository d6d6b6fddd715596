"""What a rank does in the tests of nn.functional; importable, so that processes can do it too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tokenyard
from tokenyard.nn import functional as tf
from tokenyard.testing import assert_same, routing

NUM_EXPERTS, NUM_TOPK = 6, 3
TOKENS = (4, 2, 3)  # by rank


def routed(rank: int, num_tokens: int, kind: str = "holes") -> tuple[Tensor, Tensor]:
    return routing(kind, num_tokens, NUM_TOPK, NUM_EXPERTS, seed=rank)


def dispatched_x(buffer: Any, x: Tensor) -> Tensor:
    """The rows that arrive, of x [T, D]."""
    topk_idx, weights = routed(buffer.rank, len(x))
    return tf.dispatch(buffer, x, topk_idx, weights, NUM_EXPERTS).x


def dispatched_weights(buffer: Any, weights: Tensor) -> Tensor:
    """The weights that arrive, of weights [T, K]."""
    topk_idx, _ = routed(buffer.rank, len(weights))
    x = torch.ones(len(weights), 1)
    rows = tf.dispatch(buffer, x, topk_idx, weights.float(), NUM_EXPERTS)
    return rows.topk_weights.double()


def dispatched_both(buffer: Any, x: Tensor) -> Tensor:
    """The last K columns of x are its weights, and both come back in one tensor."""
    topk_idx, _ = routed(buffer.rank, len(x))
    weights = x[:, -NUM_TOPK:].float()
    rows = tf.dispatch(buffer, x[:, :-NUM_TOPK], topk_idx, weights, NUM_EXPERTS)
    return torch.cat([rows.x, rows.topk_weights.double()], 1)


def combined(buffer: Any, y: Tensor) -> Tensor:
    """The sums of y [N, D], N being the rows that arrive here."""
    num_tokens = TOKENS[buffer.rank]
    topk_idx, weights = routed(buffer.rank, num_tokens)
    rows = tf.dispatch(buffer, torch.zeros(num_tokens, 1), topk_idx, weights, NUM_EXPERTS)
    return tf.combine(buffer, y, rows)


def dispatched_by_expert(buffer: Any, x: Tensor) -> Tensor:
    """The rows that arrive by expert, padded, of x [T, D]."""
    topk_idx, weights = routed(buffer.rank, len(x))
    return tf.dispatch_by_expert(buffer, x, topk_idx, weights, NUM_EXPERTS, expert_alignment=2).x


def layer(buffer: Any, x: Tensor, **options: Any) -> Tensor:
    """All of it, with weights that depend on x, as a router's do."""
    return _routed_layer(moe, buffer, x, **options)


def layer_by_expert(buffer: Any, x: Tensor) -> Tensor:
    return _routed_layer(moe_by_expert, buffer, x)


def _routed_layer(run: Any, buffer: Any, x: Tensor, **options: Any) -> Tensor:
    topk_idx, weights = routed(buffer.rank, len(x))
    weights = weights * (1 + x[:, :NUM_TOPK].float().tanh())
    matrices = expert_matrices(x.shape[1], x.dtype)[buffer.rank :: buffer.group_size]
    return run(buffer, x, topk_idx, weights, matrices, **options)


def moe_by_expert(
    buffer: Any, x: Tensor, topk_idx: Tensor, weights: Tensor, matrices: Tensor
) -> Tensor:
    """As `moe`, in one call each way."""
    rows = tf.dispatch_by_expert(buffer, x, topk_idx, weights, NUM_EXPERTS)
    y = torch.tanh(tf.grouped_mm(rows.x, matrices, rows.offsets))
    return tf.combine_by_expert(buffer, y, rows)


def moe(
    buffer: Any,
    x: Tensor,
    topk_idx: Tensor,
    weights: Tensor,
    matrices: Tensor,
    *,
    num_worst_tokens: int = 0,
) -> Tensor:
    """Experts that do tanh(x @ matrix)."""
    rows = tf.dispatch(buffer, x, topk_idx, weights, NUM_EXPERTS, num_worst_tokens=num_worst_tokens)
    most = num_worst_tokens * NUM_TOPK if num_worst_tokens else None
    grouped = tf.permute(rows.x, rows.topk_idx, len(matrices), num_rows=most)
    y = torch.tanh(tf.grouped_mm(grouped.x, matrices, grouped.offsets))
    out = tf.unpermute(y, grouped.row_of, rows.topk_weights)
    return tf.combine(buffer, out, rows)


def expert_matrices(hidden: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(NUM_EXPERTS, hidden, hidden, generator=generator).to(dtype)


PLACEMENT = torch.arange(NUM_EXPERTS)


def open_buffer(group: Any, **options: Any) -> tokenyard.Buffer:
    """Experts go round the ranks, as `layer` deals out their matrices."""
    return tokenyard.Buffer(group, placement=PLACEMENT % group.size(), **options)


def evaluate(group: Any, name: str, inputs: list[Tensor], transport: str) -> Tensor:
    """This rank's output of the function of this name."""
    with open_buffer(group, transport=transport) as buffer:
        return globals()[name](buffer, inputs[group.rank()])


def pull_back(
    group: Any, name: str, inputs: list[Tensor], grads: list[Tensor], transport: str
) -> Tensor:
    """The gradient of this rank's input; grads are those of the ranks' outputs."""
    with open_buffer(group, transport=transport) as buffer:
        x = inputs[group.rank()].detach().requires_grad_()
        out = globals()[name](buffer, x)
        return torch.autograd.grad(out, x, grads[group.rank()])[0]


def same_by_expert(group: Any, transport: str, dtype: torch.dtype) -> None:
    """`moe_by_expert` has the results and gradients of `moe`, by bits."""
    with open_buffer(group, transport=transport) as buffer:
        x, topk_idx, weights, matrices = _leaves(group.rank(), dtype, group.size())
        outs = []
        for run in (moe, moe_by_expert):
            out = run(buffer, x, topk_idx, weights, matrices)
            grads = torch.autograd.grad(out.square().sum(), (x, weights, matrices))
            outs.append([out.detach(), *grads])
        assert_same(outs[1], outs[0])


def sizes(group: Any) -> int:
    """How many rows arrive."""
    with open_buffer(group) as buffer:
        return len(dispatched_x(buffer, torch.zeros(TOKENS[group.rank()], 1)))


def compiled(group: Any, backend: str, num_worst_tokens: int, dtype: torch.dtype) -> None:
    """torch.compile of the layer without a graph break equals eager, backward too."""
    torch._inductor.config.compile_threads = 1
    torch._dynamo.reset()
    with open_buffer(group) as buffer:
        given = _leaves(group.rank(), dtype, group.size())
        eager = _step(moe, buffer, given, 0)
        run = torch.compile(moe, backend=backend, fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(_step(run, buffer, given, num_worst_tokens), eager)


def _leaves(rank: int, dtype: torch.dtype, num_ranks: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rank)
    topk_idx, weights = routed(rank, 10, "uniform")
    x = torch.randn(10, 16, generator=generator).to(dtype).requires_grad_()
    matrices = expert_matrices(16, dtype)[rank::num_ranks].clone().requires_grad_()
    return x, topk_idx, weights.requires_grad_(), matrices


def _step(run: Any, buffer: Any, given: tuple[Tensor, ...], worst: int) -> list[Tensor]:
    out = run(buffer, *given, num_worst_tokens=worst)
    x, _, weights, matrices = given
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, weights, matrices))]
