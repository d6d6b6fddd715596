"""Rows grouped by local expert, as a grouped GEMM wants them, and back.

What the operators of `nn.functional` do: `tokenyard.permute` takes what `Buffer.dispatch` returned,
and the result of `tokenyard.unpermute` goes to `Buffer.combine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenyard import kernels as kernel_sets
from tokenyard import validate
from tokenyard.runtime import memory
from tokenyard.types import ROW_DTYPES, SCALE_DTYPES, Permuted, UnpermuteGrads


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
    """`nn.functional.permute`, without gradients."""
    x_ND, scales_NS = _quantised(x, scales)
    device = x_ND.device
    topk_idx = validate.topk_ids("topk_idx", topk_idx, num_tokens=x_ND.shape[0], device=device)
    validate.integer("num_experts", num_experts, at_least=0, at_most=validate.MOST_EXPERTS)
    validate.integer("expert_alignment", expert_alignment, at_least=1)
    most = topk_idx.numel() + num_experts * (expert_alignment - 1)
    if most > validate.MOST:
        raise ValueError(
            f"{topk_idx.numel()} pairs of {num_experts} experts in multiples of {expert_alignment} "
            f"take up to {most} rows, want at most {validate.MOST}"
        )
    if num_rows is not None:
        validate.integer("num_rows", num_rows, at_least=0)
    if out is not None:
        out = _target(out, "rows", x_ND, (x_ND, scales_NS, topk_idx))
    kernel_set = kernel_sets.pick(kernels, device.type)
    places, first_bad = kernel_set.place(topk_idx, num_experts, expert_alignment)
    if first_bad >= 0:
        raise validate.bad_expert(topk_idx, first_bad, num_experts)
    if num_rows is None:
        num_rows = places.num_rows
    elif num_rows < places.num_rows:
        raise ValueError(f"num_rows is {num_rows}, want at least the {places.num_rows} there are")

    def spread(rows: Tensor, into: Tensor | None) -> Tensor:
        if into is None:
            into = memory.empty(num_rows, rows.shape[1], dtype=rows.dtype, device=device)
        kernel_set.spread(memory.as_bytes(rows), places.row_of, memory.as_bytes(into))
        return into

    if out is not None:
        if out.shape[0] < num_rows:
            raise ValueError(f"out has {out.shape[0]} rows, want at least {num_rows}")
        out = out[:num_rows]
    return Permuted(
        x=spread(x_ND, out),
        scales=None if scales_NS is None else spread(scales_NS, None),
        row_of=places.row_of,
        offsets=places.offsets,
    )


def unpermute(
    y: Tensor,
    row_of: Tensor,
    *,
    weights: Tensor | None = None,
    out: Tensor | None = None,
    kernels: str = "auto",
) -> Tensor:
    """`nn.functional.unpermute`, without gradients."""
    y_MD = _rows("y", y, num_rows="rows", dtypes=validate.SUMMABLE, device=None)
    device, dtype = y_MD.device, y_MD.dtype
    row_of = _row_of(row_of, "rows", device)
    if weights is not None:
        weights = _weights(weights, row_of, y_MD)
    if out is None:
        out_ND = memory.empty(row_of.shape[0], y_MD.shape[1], dtype=dtype, device=device)
    else:
        out_ND = _target(out, row_of.shape[0], y_MD, (y_MD, row_of, weights))
    kernel_set = kernel_sets.pick(kernels, device.type)
    first_bad = kernel_set.unpermute(y_MD, row_of, weights, out_ND)
    if first_bad >= 0:
        raise _bad_row(row_of, first_bad, len(y_MD), f"y has {len(y_MD)} rows")
    return out_ND


def unpermute_backward(
    grad: Tensor, y: Tensor, row_of: Tensor, weights: Tensor, *, kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The gradients of unpermute's y and weights, of which grad [N, D] is the result's.

    A row of y gets its weight times grad, rounded once; a weight the dot product of grad and its
    row of y, in float32 (float64 for float64), rounded to its own dtype. Zeros elsewhere.

    >>> grad, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.5, 7.0]])
    >>> row_of, weights = torch.tensor([[1, -1]]), torch.tensor([[10.0, 5.0]])
    >>> [one.tolist() for one in unpermute_backward(grad, y, row_of, weights)]
    [[[0.0, 0.0], [10.0, 20.0]], [[14.5, 0.0]]]
    """
    y_MD = _rows("y", y, num_rows="rows", dtypes=validate.SUMMABLE, device=None)
    (num_places, hidden), device = y_MD.shape, y_MD.device
    grad_ND = _rows("grad", grad, num_rows="rows", dtypes=(y_MD.dtype,), device=device)
    validate.require(
        grad_ND.shape[1] == hidden, f"grad has hidden size {grad_ND.shape[1]}, want y's {hidden}"
    )
    row_of = _row_of(row_of, grad_ND.shape[0], device)
    wide = _weights(weights, row_of, y_MD)
    out = UnpermuteGrads(
        memory.empty(num_places, hidden, dtype=y_MD.dtype, device=device),
        memory.empty(*row_of.shape, dtype=wide.dtype, device=device),
    )
    kernel_set = kernel_sets.pick(kernels, device.type)
    first_bad = kernel_set.unpermute_backward(grad_ND, y_MD, row_of, wide, out)
    if first_bad >= 0:
        raise _bad_row(row_of, first_bad, len(y_MD), f"y has {len(y_MD)} rows")
    return out.y, out.weights.to(weights.dtype)


def spread(x: Tensor, row_of: Tensor, num_rows: int, *, kernels: str = "auto") -> Tensor:
    """[num_rows, D]: the rows of x where permute put them, zeros elsewhere.

    The gradient of unpermute's y where there are no weights.

    >>> spread(torch.tensor([[7.0], [8.0]]), torch.tensor([[3, -1], [0, 2]]), 4).flatten().tolist()
    [8.0, 0.0, 8.0, 7.0]
    """
    x_ND = _rows("x", x, num_rows="rows", dtypes=ROW_DTYPES, device=None)
    row_of = _row_of(row_of, x_ND.shape[0], x_ND.device)
    validate.integer("num_rows", num_rows, at_least=0)
    outside = ((row_of < -1) | (row_of >= num_rows)).flatten()
    if outside.any():
        raise _bad_row(row_of, int(outside.nonzero()[0]), num_rows, f"num_rows={num_rows}")
    out = memory.empty(num_rows, x_ND.shape[1], dtype=x_ND.dtype, device=x_ND.device)
    kernel_set = kernel_sets.pick(kernels, x_ND.device.type)
    kernel_set.spread(memory.as_bytes(x_ND), row_of, memory.as_bytes(out))
    return out


def _quantised(x: Any, scales: Any) -> tuple[Tensor, Tensor | None]:
    """x and scales, given as a pair or one by one."""
    names = "x", "scales"
    if isinstance(x, tuple):
        validate.require(
            len(x) == 2, f"x is a tuple of {len(x)}, want a tensor or the pair (x, scales)"
        )
        validate.require(
            scales is None, "scales are given twice, want x as a tensor or no scales beside it"
        )
        names = "x[0]", "x[1] (scales)"
        x, scales = x
        validate.require(scales is not None, "x[1] (scales) is None, want a torch.Tensor")
    x_ND = _rows(names[0], x, num_rows="rows", dtypes=ROW_DTYPES, device=None)
    if scales is None:
        return x_ND, None
    num_rows, device = x_ND.shape[0], x_ND.device
    return x_ND, _rows(names[1], scales, num_rows=num_rows, dtypes=SCALE_DTYPES, device=device)


def _rows(
    what: str,
    value: Any,
    *,
    num_rows: int | str,
    dtypes: Sequence[torch.dtype],
    device: torch.device | None,
) -> Tensor:
    """Rows may lie apart, but a row's elements side by side."""
    value = validate.tensor(what, value, shape=(num_rows, "hidden"), dtypes=dtypes, device=device)
    validate.require(value.shape[1] > 0, f"{what} has hidden size 0, want at least 1")
    return value if value.stride(1) == 1 else value.clone(memory_format=torch.contiguous_format)


def _row_of(value: Any, num_rows: int | str, device: torch.device) -> Tensor:
    value = validate.tensor(
        "row_of", value, shape=(num_rows, "topk"), dtypes=(torch.int64,), device=device
    )
    validate.require(value.shape[1] > 0, "row_of has top-k 0, want at least 1")
    return value.contiguous()


def _weights(value: Any, row_of: Tensor, y_MD: Tensor) -> Tensor:
    """The weights in the dtype of the sums."""
    value = validate.tensor(
        "weights", value, shape=row_of.shape, dtypes=validate.SUMMABLE, device=y_MD.device
    )
    return value.to(kernel_sets.wide_dtype(y_MD.dtype)).contiguous()


def _bad_row(row_of: Tensor, place: int, num_rows: int, why: str) -> ValueError:
    row, k = divmod(place, row_of.shape[1])
    return ValueError(
        f"row_of[{row}, {k}] is {row_of[row, k].item()}, want -1..{num_rows - 1} ({why})"
    )


def _target(out: Any, num_rows: int | str, like: Tensor, read: Sequence[Tensor | None]) -> Tensor:
    """Memory of the user's for a result like `like`, which shares none with what is read."""
    hidden = like.shape[1]
    out = validate.target(
        "out", out, shape=(num_rows, hidden), dtypes=(like.dtype,), device=like.device
    )
    apart = out.stride(0) >= hidden or out.shape[0] < 2
    validate.require(
        out.stride(1) == 1 and apart,
        f"out has strides {list(out.stride())}, want [at least {hidden}, 1]",
    )
    view = validate.View.of(out)
    meets = any(one is not None and validate.meet(view, validate.View.of(one)) for one in read)
    validate.require(not meets, "out shares memory with what is read, want memory of its own")
    return out
