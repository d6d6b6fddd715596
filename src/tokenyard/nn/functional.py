"""dispatch, combine, permute and unpermute as functions that gradients pass through.

    rows = dispatch(buffer, x, topk_idx, topk_weights, num_experts)
    grouped = permute(rows.x, rows.topk_idx, num_local)
    y = grouped_mm(grouped.x, weights, grouped.offsets)
    out = combine(buffer, unpermute(y, grouped.row_of, rows.topk_weights), rows)

Or, with the same results and gradients, but fewer copies:

    rows = dispatch_by_expert(buffer, x, topk_idx, topk_weights, num_experts)
    y = grouped_mm(rows.x, weights, rows.offsets)
    out = combine_by_expert(buffer, y, rows)

Dispatch and combine are each other's gradient, and so are permute and unpermute. A backward pass
uses the handle of the forward pass, without counting again. All are operators of torch.library, so
torch.compile keeps them as nodes of its graph.

Backward passes exchange rows too, so every rank must make the same calls in the same order there.
Autograd does so for the same model if the same inputs require grad: x or topk_weights of a dispatch
on all ranks or on none, and likewise y of a combine. Ranks that differ raise CallMismatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.buffer import Buffer
from tokenyard.nn import operators
from tokenyard.nn.plain import autocast_device, require_known_rows, require_plain
from tokenyard.nn.stacks import require_place
from tokenyard.nn.tickets import number_of
from tokenyard.ops import permute as rows_in_place
from tokenyard.types import Permuted


class Rows(NamedTuple):
    """What dispatch returns: the tensors of `Buffer.dispatch`, and the way back for combine."""

    x: Tensor  # [N, D]
    topk_idx: Tensor  # [N, K] local expert ids, -1 where the expert is elsewhere
    topk_weights: Tensor  # [N, K]
    ticket: Tensor  # [1] stands for the handle, which lives as long as this tensor's memory
    num_tokens: int  # T of the dispatch


def dispatch(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    *,
    num_worst_tokens: int = 0,
    place: int | None = None,
    balanced: bool = False,
) -> Rows:
    """Send every token once to each rank that owns one of its experts. x and topk_weights get
    gradients.

    With num_worst_tokens the result has exactly so many rows, whatever arrives. No size depends on
    the routing then, and torch.compile needs no graph break.

    `place` is the mark of the placement that the caller's weights lie in
    (`buffer.get_placement(num_experts).mark` when they were made). If the Buffer has another by
    now, all ranks raise ValueError.

    With `balanced`, a Buffer that has a balance and no graph, topk_idx of the result counts the
    experts of the node (`buffer.get_node_experts`); else this rank's own.
    """
    require_plain("dispatch", x=x, topk_idx=topk_idx, topk_weights=topk_weights)
    if not num_worst_tokens:
        require_known_rows("dispatch", x, "num_worst_tokens")
    number, graph = number_of(buffer), _makes_graph(x, topk_weights)
    more = num_worst_tokens, place, graph, balanced and not graph
    rows, ids, weights, ticket = operators.dispatch(
        x, topk_idx, topk_weights, number, num_experts, *more
    )
    return Rows(rows, ids, weights, ticket, x.shape[0])


def combine(buffer: Buffer, y: Tensor, rows: Rows) -> Tensor:
    """[T, D]: the sum of each token's results y [N, D], back on its rank; rows are dispatch's."""
    require_plain("combine", y=y)
    number, graph = number_of(buffer), _makes_graph(y)
    return operators.combine(y, rows.ticket, number, rows.num_tokens, graph)


class RowsByExpert(NamedTuple):
    """What dispatch_by_expert returns: rows for a grouped GEMM, and the way back."""

    x: Tensor  # [M, D] by (expert, source rank, token)
    offsets: Tensor  # [L] int32, the end of each expert's rows: those of grouped_mm
    row_of: Tensor  # [N, K] the row of x of each pair that came to this rank, -1 for others
    topk_weights: Tensor  # [N, K]
    ticket: Tensor  # [1] stands for the handle, which lives as long as this tensor's memory
    num_tokens: int  # T of the dispatch


def dispatch_by_expert(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    *,
    expert_alignment: int = 1,
    place: int | None = None,
    balanced: bool = False,
) -> RowsByExpert:
    """Send every token to each of its experts: dispatch and permute as one call. x and topk_weights
    get gradients. `place` and `balanced` are those of dispatch.
    """
    require_plain("dispatch_by_expert", x=x, topk_idx=topk_idx, topk_weights=topk_weights)
    require_known_rows("dispatch_by_expert", x, "dispatch with num_worst_tokens")
    number, graph = number_of(buffer), _makes_graph(x, topk_weights)
    more = expert_alignment, place, graph, balanced and not graph
    rows, offsets, row_of, weights, ticket = operators.dispatch_by_expert(
        x, topk_idx, topk_weights, number, num_experts, *more
    )
    return RowsByExpert(rows, offsets, row_of, weights, ticket, x.shape[0])


def combine_by_expert(
    buffer: Buffer, y: Tensor, rows: RowsByExpert, num_tokens: int | None = None
) -> Tensor:
    """[T, D]: for each token the sum over its experts of weight times their row of y [M, D], back
    on its rank. The weights are dispatch_by_expert's, whatever became of rows.topk_weights since.

    num_tokens, T, is that of rows, and need not be given.
    """
    require_plain("combine_by_expert", y=y)
    number, graph = number_of(buffer), _makes_graph(y, rows.topk_weights)
    if num_tokens is None:
        num_tokens = rows.num_tokens
    return operators.combine_by_expert(
        y, rows.row_of, rows.topk_weights, rows.ticket, number, num_tokens, graph
    )


def through_experts(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    experts: Callable[[Tensor, Tensor], Tensor],
    *,
    place: int | None = None,
    balanced: bool = True,
) -> Tensor:
    """[T, D]: dispatch_by_expert, y = experts(x [M, D], offsets [L]) and combine_by_expert, by an
    exchange that is prepared once where there can be one (`few_through_experts`). `place` and
    `balanced` are those of dispatch.
    """
    given = buffer, x, topk_idx, topk_weights, num_experts
    sums = few_through_experts(*given, experts, place=place, balanced=balanced)
    if sums is not None:
        return sums
    rows = dispatch_by_expert(*given, place=place, balanced=balanced)
    y = experts(rows.x, rows.offsets)
    return combine_by_expert(buffer, y, rows)


def few_through_experts(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    experts: Callable[[Tensor, Tensor], Tensor],
    *,
    place: int | None = None,
    balanced: bool = True,
) -> Tensor | None:
    """[T, D]: dispatch_by_expert, y = experts(x [M, D], offsets [L]) and combine_by_expert, if
    tokens are few, no gradient is wanted and the Buffer can prepare such an exchange; else None.

    Results are the same to the bit, other ranks may make the other calls, and x stays as it is for
    as long as somebody holds it.
    """
    given = x, topk_idx, topk_weights
    if torch.is_grad_enabled() or operators.is_looked_at(given) or (few := buffer._few) is None:
        return None
    if place is not None:
        require_place(buffer, num_experts, place)
    with operators.same_on_all_ranks("x or topk_weights of dispatch_by_expert", False):
        step = few.dispatch(*given, num_experts, tag=0, balanced=balanced)
    if step is None:
        return None
    y = experts(step.x, step.offsets)
    with operators.same_on_all_ranks("y or topk_weights of combine_by_expert", False):
        return step.combine(y)


def permute(
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    num_experts: int,
    *,
    expert_alignment: int = 1,
    scales: Tensor | None = None,
    out: Tensor | None = None,
    num_rows: int | None = None,
    kernels: str = "auto",
) -> Permuted:
    """One copy of a row for each of its local experts, by (expert, row, k).

    x is [N, D], or the pair (x, scales [N, S]). topk_idx [N, K] has local ids, int32 or int64, -1
    where an expert lives elsewhere. Each expert's rows are padded with zeros to a multiple of
    expert_alignment. If `out` is given, the result's x is made of its first rows. If num_rows is
    given, the result has exactly so many rows, whatever the routing, as torch.compile needs: rows
    of zeros, which belong to no expert, follow the last offset.

    x gets gradients, but for a call with scales, `out` or `kernels`, which raises if x requires
    any.

    >>> x, topk_idx = torch.tensor([[10.0], [20.0]]), torch.tensor([[1, -1], [0, 1]])
    >>> got = permute(x, topk_idx, num_experts=2, expert_alignment=2)
    >>> got.x.flatten().tolist(), got.offsets.tolist()
    ([20.0, 0.0, 10.0, 20.0], [2, 4])
    >>> unpermute(got.x * 3, got.row_of).flatten().tolist()  # row 1 has two experts
    [30.0, 120.0]
    """
    if not isinstance(x, Tensor) or scales is not None or out is not None or kernels != "auto":
        _require_no_gradients("permute with scales, out or kernels", x, scales)
        return rows_in_place.permute(
            x,
            topk_idx,
            num_experts,
            expert_alignment=expert_alignment,
            scales=scales,
            out=out,
            num_rows=num_rows,
            kernels=kernels,
        )
    require_plain("permute", x=x, topk_idx=topk_idx)
    if num_rows is None:
        require_known_rows("permute", x, "num_rows")
    else:
        validate.integer("num_rows", num_rows, at_least=0)
    rows, row_of, offsets = operators.permute(
        x, topk_idx, num_experts, expert_alignment, -1 if num_rows is None else num_rows
    )
    return Permuted(x=rows, scales=None, row_of=row_of, offsets=offsets)


def unpermute(
    y: Tensor,
    row_of: Tensor,
    weights: Tensor | None = None,
    *,
    out: Tensor | None = None,
    kernels: str = "auto",
) -> Tensor:
    """[N, D]: the sum over k of a row's results, times weights[n, k] if given.

    y is [M, D] in float64, float32, float16 or bfloat16; row_of [N, K] is permute's. Summed in
    float32 (float64 for float64) from 0, k ascending, and rounded once; a product is rounded before
    it is added. A row with no expert gives 0. If `out` is given, it is filled and returned.

    y and weights get gradients, but for a call with `out` or `kernels`, which raises if one
    requires any.

    >>> y, row_of = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[2, 0], [-1, 1]])
    >>> unpermute(y, row_of, weights=torch.tensor([[0.5, 3.0], [9.0, 0.25]])).tolist()
    [[5.0], [0.5]]
    """
    if out is not None or kernels != "auto":
        _require_no_gradients("unpermute with out or kernels", y, weights)
        return rows_in_place.unpermute(y, row_of, weights=weights, out=out, kernels=kernels)
    require_plain("unpermute", y=y, row_of=row_of, weights=weights)
    return operators.unpermute(y, row_of, weights)


def grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """x [M, A] times weights [L, A, B] -> [M, B]: each row with its expert's matrix.

    As torch.nn.functional.grouped_mm with `offs`. Beyond that it takes float64, any A and B, and
    gradients of any strides, and writes zeros after the last group.

    >>> from torch import int32, tensor
    >>> x, weights = tensor([[1.0], [2.0], [3.0], [4.0]]), tensor([[[10.0]], [[100.0]]])
    >>> grouped_mm(x, weights, tensor([1, 3], dtype=int32)).flatten().tolist()
    [10.0, 200.0, 300.0, 0.0]

    Under torch.autocast it computes in autocast's dtype, as other matrix products do.
    """
    require_plain("grouped_mm", x=x, weights=weights, offsets=offsets)
    return operators.grouped_mm(autocast(x), autocast(weights), offsets)


def autocast(x: Tensor) -> Tensor:
    """x in the dtype of torch.autocast, if that is on; float64 stays."""
    kind = autocast_device(x)
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def gather_over_ranks(buffer: Buffer, x: Tensor) -> Tensor:
    """[R, D]: x [D] of every rank, ranks ascending, on all ranks. For a few numbers; no gradients.

    `Buffer.all_gather` as an operator that torch.compile keeps.
    """
    return operators.gather_over_ranks(x, number_of(buffer))


def sum_over_ranks(buffer: Buffer, x: Tensor) -> Tensor:
    """[D]: the sum of x [D] of all ranks, on all ranks. For a few numbers, such as loads."""
    require_plain("sum_over_ranks", x=x)
    return operators.sum_over_ranks(x, number_of(buffer))


def _require_no_gradients(what: str, *given: object) -> None:
    tensors = [one for one in given if isinstance(one, Tensor)]
    if tensors and _makes_graph(*tensors):
        raise ValueError(f"{what} has no gradients, and a tensor requires some: want detach()")


def _makes_graph(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
