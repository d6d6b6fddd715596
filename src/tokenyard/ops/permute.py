"""Rows grouped by local expert, as a grouped GEMM wants them, and back.

`permute` takes what `Buffer.dispatch` returned; what `unpermute` makes goes to `Buffer.combine`.
Gradients do not pass through either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenyard import kernels as kernel_sets
from tokenyard import memory, validate
from tokenyard.types import ROW_DTYPES, SCALE_DTYPES, Permuted


def permute(
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    num_experts: int,
    *,
    expert_alignment: int = 1,
    scales: Tensor | None = None,
    out: Tensor | None = None,
    kernels: str = "auto",
) -> Permuted:
    """One copy of a row for each of its local experts, by (expert, row, k).

    x is [N, D], or the pair (x, scales [N, S]). topk_idx [N, K] has local ids, int32 or int64, -1
    where an expert lives elsewhere. Each expert's rows are padded with zeros to a multiple of
    expert_alignment. If `out` is given, the result's x is made of its first rows.

    >>> x, topk_idx = torch.tensor([[10.0], [20.0]]), torch.tensor([[1, -1], [0, 1]])
    >>> got = permute(x, topk_idx, num_experts=2, expert_alignment=2)
    >>> got.x.flatten().tolist(), got.offsets.tolist()
    ([20.0, 0.0, 10.0, 20.0], [2, 4])
    >>> unpermute(got.x * 3, got.row_of).flatten().tolist()  # row 1 has two experts
    [30.0, 120.0]
    """
    x_ND, scales_NS = _quantised(x, scales)
    num_rows, device = x_ND.shape[0], x_ND.device
    topk_idx = validate.topk_ids("topk_idx", topk_idx, num_tokens=num_rows, device=device)
    validate.integer("num_experts", num_experts, at_least=0, at_most=validate.MOST_EXPERTS)
    validate.integer("expert_alignment", expert_alignment, at_least=1)
    most = topk_idx.numel() + num_experts * (expert_alignment - 1)
    if most > validate.MOST:
        raise ValueError(
            f"{topk_idx.numel()} pairs of {num_experts} experts in multiples of {expert_alignment} "
            f"take up to {most} rows, want at most {validate.MOST}"
        )
    if out is not None:
        out = _target(out, "rows", x_ND)
    kernel_set = kernel_sets.pick(kernels, device.type)
    places, first_bad = kernel_set.place(topk_idx, num_experts, expert_alignment)
    if first_bad >= 0:
        raise validate.bad_expert(topk_idx, first_bad, num_experts)

    def spread(rows: Tensor, into: Tensor | None) -> Tensor:
        if into is None:
            into = memory.empty(places.num_rows, rows.shape[1], dtype=rows.dtype, device=device)
        kernel_set.spread(memory.as_bytes(rows), places.row_of, memory.as_bytes(into))
        return into

    if out is not None:
        if out.shape[0] < places.num_rows:
            raise ValueError(f"out has {out.shape[0]} rows, want at least {places.num_rows}")
        out = out[: places.num_rows]
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
    """[N, D]: the sum over k of a row's results, times weights[n, k] if given.

    y is [M, D] in float64, float32, float16 or bfloat16; row_of [N, K] is permute's. Summed in
    float32 (float64 for float64) from 0, k ascending, and rounded once; a product is rounded before
    it is added. A row with no expert gives 0. If `out` is given, it is filled and returned.

    >>> y, row_of = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[2, 0], [-1, 1]])
    >>> unpermute(y, row_of, weights=torch.tensor([[0.5, 3.0], [9.0, 0.25]])).tolist()
    [[5.0], [0.5]]
    """
    y_MD = _rows("y", y, num_rows="rows", dtypes=validate.SUMMABLE, device=None)
    device, dtype = y_MD.device, y_MD.dtype
    row_of = validate.tensor(
        "row_of", row_of, shape=("rows", "topk"), dtypes=(torch.int64,), device=device
    )
    validate.require(row_of.shape[1] > 0, "row_of has top-k 0, want at least 1")
    if weights is not None:
        weights = validate.tensor(
            "weights", weights, shape=row_of.shape, dtypes=validate.SUMMABLE, device=device
        )
        weights = weights.to(kernel_sets.wide_dtype(dtype)).contiguous()
    if out is None:
        out_ND = memory.empty(row_of.shape[0], y_MD.shape[1], dtype=dtype, device=device)
    else:
        out_ND = _target(out, row_of.shape[0], y_MD)
    kernel_set = kernel_sets.pick(kernels, device.type)
    first_bad = kernel_set.unpermute(y_MD, row_of.contiguous(), weights, out_ND)
    if first_bad >= 0:
        row, k = divmod(first_bad, row_of.shape[1])
        raise ValueError(
            f"row_of[{row}, {k}] is {row_of[row, k].item()}, want -1..{len(y_MD) - 1} "
            f"(y has {len(y_MD)} rows)"
        )
    return out_ND


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


def _target(out: Any, num_rows: int | str, like: Tensor) -> Tensor:
    """Memory of the user's for a result like `like`."""
    hidden = like.shape[1]
    out = validate.tensor(
        "out", out, shape=(num_rows, hidden), dtypes=(like.dtype,), device=like.device
    )
    apart = out.stride(0) >= hidden or out.shape[0] < 2
    validate.require(
        out.stride(1) == 1 and apart,
        f"out has strides {list(out.stride())}, want [at least {hidden}, 1]",
    )
    return out
