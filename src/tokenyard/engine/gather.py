"""Rows to all ranks: a dispatch in which every token goes everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.engine import Engine
from tokenyard.engine.inputs import AgainRequest, DispatchRequest
from tokenyard.results import Handle
from tokenyard.runtime.completion import AT_ONCE
from tokenyard.types import ROW_DTYPES, Config

_STAGE = "all_gather"


def all_gather(engine: Engine, x: Any, handle: Any, config: Config) -> tuple[Tensor, Handle]:
    """x of all ranks, by rank, and the handle of the route; along an earlier handle if given."""
    try:
        rows = _as_rows(x)
        if handle is not None:
            handle = engine.known(handle)
            _check_route(handle)
    except Exception as error:
        engine.reject(_STAGE, error)
    if handle is None:
        request = _request(engine, rows, config)
        received, handle, _ = engine.calls.dispatch(request, AT_ONCE, _STAGE)
        got = received.x
    else:
        got, _, _ = engine.calls.dispatch_again(AgainRequest(rows, handle, config), AT_ONCE)
        got = got[: handle.flow.num_received]  # without those that num_worst_tokens adds
    return got.view(x.dtype).reshape(got.shape[0], *x.shape[1:]), handle


def _request(engine: Engine, rows_TD: Tensor, config: Config) -> DispatchRequest:
    num_tokens, num_ranks, device = rows_TD.shape[0], engine.num_ranks, rows_TD.device
    everywhere_TR = torch.ones(num_tokens, num_ranks, dtype=torch.bool, device=device)
    per_rank = torch.full((num_ranks,), num_tokens, dtype=torch.int32, device=device)
    num_experts = engine.local.any_num_experts
    return DispatchRequest.by_layout(rows_TD, everywhere_TR, per_rank, num_experts, config, -1)


def _as_rows(x: Any) -> Tensor:
    """[T, D]; as bytes if rows of a Buffer cannot have x's dtype."""
    if not isinstance(x, Tensor):
        raise validate.not_a_tensor("x", x)
    validate.require(x.dim() > 0, "x has shape [], want [tokens, ...]")
    validate.require(x.layout is torch.strided, f"x has layout {x.layout}, want torch.strided")
    rows = x[:, None] if x.dim() == 1 else x.flatten(1)
    return rows if x.dtype in ROW_DTYPES else rows.contiguous().view(torch.uint8)


def _check_route(handle: Handle) -> None:
    flow = handle.flow
    validate.require(
        flow.num_received == int(flow.tokens_R.sum()),
        f"handle is of a dispatch (call {handle.call}) in which not every token went to every "
        "rank, want one of all_gather",
    )
