"""Rows by expert on any transport: dispatch and permute, unpermute and combine.

Rows are dispatched, and then copied to their places; each rank sums its share of each token, and
shares are combined as rows are. Where all ranks share memory `engine.parcels` does it in one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from tokenyard import validate
from tokenyard.engine.core import Core
from tokenyard.engine.inputs import CombineRequest, DispatchRequest
from tokenyard.kernels.base import wide_dtype
from tokenyard.results import Handle
from tokenyard.runtime.completion import AT_ONCE
from tokenyard.runtime.memory import as_bytes
from tokenyard.types import ByExpert, KnownPairs

DISPATCH, COMBINE = "dispatch by expert", "combine by expert"


class RowsByExpert(NamedTuple):
    """What dispatch_by_expert brings to one rank: M rows by (local expert, source rank, token)."""

    x: Tensor  # [M, D]
    scales: Tensor | None  # [M, S]; FP8 only
    offsets: Tensor  # [L] int32, the end of each expert's rows with their padding
    num_tokens_per_expert: list[int]  # L, padding included


def dispatch_and_spread(
    core: Core, dispatch: Callable[..., Any], request: DispatchRequest
) -> tuple[RowsByExpert, Handle]:
    try:
        validate.require(request.topk_idx is not None, "topk_idx is None, want a torch.Tensor")
        alignment = validate.alignment(request.expert_alignment)
    except ValueError as error:
        core.reject(DISPATCH, error)
    received, handle, _ = dispatch(request, AT_ONCE, DISPATCH)
    assert received.topk_idx is not None
    assert received.topk_weights is not None
    kernels, per_expert = core.kernels, received.num_tokens_per_expert
    places, _ = kernels.place(received.topk_idx, len(per_expert), alignment)

    def spread(rows: Tensor) -> Tensor:
        out = core.transport.empty(places.num_rows, rows.shape[1], rows.dtype)
        kernels.spread(as_bytes(rows), places.row_of, as_bytes(out))
        return out

    x, scales = spread(received.x), received.scales
    # A copy: the handle must not keep the memory in which the rows lie.
    kept = received.topk_weights.clone()
    handle.by_expert = ByExpert(num_rows=places.num_rows, row_of=places.row_of, topk_weights=kept)
    came = None if scales is None else spread(scales)
    return RowsByExpert(x, came, places.offsets, per_expert), handle


def share_and_combine(
    core: Core, combine: Callable[..., Any], request: CombineRequest, weigh: Any
) -> Tensor:
    try:
        known, rows, out = check_rows(core, request, weigh)
        assert known.by_expert is not None
        share = share_of(core, rows, known.by_expert, weigh)
    except Exception as error:
        core.reject(COMBINE, error)
    request = request._replace(x=share, handle=known, out=out)
    return combine(request, AT_ONCE, COMBINE)[0]


def check_rows(
    core: Core, request: CombineRequest, weigh: Any
) -> tuple[Handle, Tensor, Tensor | None]:
    """The handle, the rows and `out` of a combine by expert."""
    known = core.known(request.handle)
    if known.by_expert is None:
        raise ValueError(
            f"handle is of dispatch call {known.call}, want one that dispatch_by_expert returned"
        )
    rows = validate.rows(
        "y",
        request.x,
        num_rows=known.by_expert.num_rows,
        dtypes=validate.SUMMABLE,
        device=core.transport.device,
    )
    validate.switch("weigh", weigh)
    out = request.out
    if out is not None:
        out = validate.out(out, known.num_tokens, rows, [rows])
    return known, rows, out


def share_of(core: Core, y_MD: Tensor, by_expert: KnownPairs, weigh: bool) -> Tensor:
    """[N, D]: this rank's share of each token that it got, where combine need not copy it."""
    row_of = by_expert.row_of
    share = core.transport.empty(row_of.shape[0], y_MD.shape[1], y_MD.dtype)
    weights = by_expert.topk_weights.to(wide_dtype(y_MD.dtype)) if weigh else None
    core.kernels.unpermute(y_MD, row_of, weights, share)
    return share
