"""Rows by expert: dispatch and permute as one call, unpermute and combine as another."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tokenyard import validate
from tokenyard.engine.inputs import DispatchRequest
from tokenyard.engine.stages import Engine
from tokenyard.kernels.base import wide_dtype
from tokenyard.runtime.completion import Completion
from tokenyard.runtime.memory import as_bytes
from tokenyard.types import ByExpert, Config, Handle

_DISPATCH, _COMBINE = "dispatch by expert", "combine by expert"
# More than any kernel wants. With far more, padding alone would not fit offsets of int32.
_MOST_ALIGNED = 1 << 16


class RowsByExpert(NamedTuple):
    """What dispatch_by_expert brings to one rank: M rows by (local expert, source rank, token)."""

    x: Tensor  # [M, D]
    scales: Tensor | None  # [M, S]; FP8 only
    offsets: Tensor  # [L] int32, the end of each expert's rows with their padding
    num_tokens_per_expert: list[int]  # L, padding included


def dispatch_by_expert(engine: Engine, request: DispatchRequest) -> tuple[RowsByExpert, Handle]:
    try:
        validate.require(request.topk_idx is not None, "topk_idx is None, want a torch.Tensor")
        alignment = validate.integer(
            "expert_alignment", request.expert_alignment, at_least=1, at_most=_MOST_ALIGNED
        )
    except ValueError as error:
        raise _refused(engine, _DISPATCH, error) from None
    received, handle, _ = engine.dispatch(request, Completion(), _DISPATCH)
    assert received.topk_idx is not None
    assert received.topk_weights is not None
    kernels, per_expert = engine.kernels, received.num_tokens_per_expert
    places, _ = kernels.place(received.topk_idx, len(per_expert), alignment)

    def spread(rows: Tensor) -> Tensor:
        out = engine.transport.empty(places.num_rows, rows.shape[1], rows.dtype)
        kernels.spread(as_bytes(rows), places.row_of, as_bytes(out))
        return out

    rows = RowsByExpert(
        x=spread(received.x),
        scales=None if received.scales is None else spread(received.scales),
        offsets=places.offsets,
        num_tokens_per_expert=per_expert,
    )
    handle.by_expert = ByExpert(
        num_rows=places.num_rows,
        row_of=places.row_of,
        # A copy: the handle must not keep the memory in which the rows lie.
        topk_weights=received.topk_weights.clone(),
    )
    return rows, handle


def combine_by_expert(
    engine: Engine, y: Any, handle: Any, weigh: Any, out: Any, config: Config, tag: Any
) -> Tensor:
    try:
        known, by_expert = _handle(handle, engine.buffer_id)
        rows = validate.rows(
            "y",
            y,
            num_rows=by_expert.num_rows,
            dtypes=validate.SUMMABLE,
            device=engine.transport.device,
        )
        validate.switch("weigh", weigh)
        if out is not None:
            validate.out(out, known.num_tokens, rows, [rows])
        share = _sum_own(engine, rows, by_expert, weigh)
    except Exception as error:
        raise _refused(engine, _COMBINE, error) from None
    sums, _, _ = engine.combine(
        share, known, None, None, out, config, None, tag, Completion(), _COMBINE
    )
    return sums


def _handle(handle: Any, buffer_id: int) -> tuple[Handle, ByExpert]:
    known = validate.handle(handle, buffer_id)
    if known.by_expert is None:
        raise ValueError(
            f"handle is of dispatch call {known.call}, want one that dispatch_by_expert returned"
        )
    return known, known.by_expert


def _sum_own(engine: Engine, y_MD: Tensor, by_expert: ByExpert, weigh: bool) -> Tensor:
    """[N, D]: this rank's share of each token that it got, where combine need not copy it."""
    row_of = by_expert.row_of
    share = engine.transport.empty(row_of.shape[0], y_MD.shape[1], y_MD.dtype)
    weights = by_expert.topk_weights.to(wide_dtype(y_MD.dtype)) if weigh else None
    engine.kernels.unpermute(y_MD, row_of, weights, share)
    return share


def _refused(engine: Engine, stage: str, error: Exception) -> Exception:
    """All ranks raise: this one the error, the others PeerInputError."""
    engine.refuse(engine.agreement.named(stage, error))
    return AssertionError("a refusal raises")
