"""Sums by top-k lane on any transport: rows travel home as they are, and are summed there.

The way home is a dispatch of its own: each row goes to the rank of its token. It is the same on
every transport and kernel set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenyard.engine.engine import Engine
from tokenyard.engine.inputs import DispatchRequest
from tokenyard.engine.lane_order import Lanes, last_of_group
from tokenyard.runtime.completion import AT_ONCE
from tokenyard.types import Config


def bring_home(
    engine: Engine,
    rows_ND: Tensor,
    beside_NK: Tensor | None,
    counts_R: Sequence[int],
    config: Config,
    tag: int,
) -> tuple[Tensor, Tensor | None]:
    """The rows of this rank's tokens by (rank that had them, token, lane), and what went beside.

    `counts` says how many of the rows, one rank's after the other's, belong to each rank.
    """
    num_ranks, device = engine.num_ranks, rows_ND.device
    per_rank = torch.tensor(counts_R, dtype=torch.int32, device=device)
    homes_N = torch.repeat_interleave(torch.arange(num_ranks, device=device), per_rank)
    request = DispatchRequest.by_layout(
        rows_ND if beside_NK is None else (rows_ND, beside_NK),
        homes_N[:, None] == torch.arange(num_ranks, device=device),
        per_rank,
        engine.local.any_num_experts,
        config,
        tag,
    )
    got, _, _ = engine.calls.dispatch(request, AT_ONCE, "combine")
    return got.x, got.scales


def sum_by_lane(
    engine: Engine,
    rows_HD: Tensor,
    row_TK: Tensor,
    lanes: Lanes,
    node_of_rank: Sequence[int] | None,
    biases_TD: Sequence[Tensor],
) -> Tensor:
    """[T, D]: from the biases, the row of each lane, by ascending lane. `row_TK` is -1 where a lane
    has none. With nodes, the rows of each are summed and rounded first.
    """
    (num_tokens, num_topk), hidden = row_TK.shape, rows_HD.shape[1]
    if node_of_rank is not None:
        nodes = torch.tensor([*node_of_rank, -1], device=row_TK.device)
        node_TK = nodes[lanes.rank_TK]
        is_last = last_of_group(node_TK)
        token, lane = is_last.nonzero(as_tuple=True)
        of_node = node_TK[token] == node_TK[token, lane][:, None]
        rows_HD = _sum(engine, rows_HD, torch.where(of_node, row_TK[token], -1))
        row_TK = torch.full_like(row_TK, -1)
        row_TK[is_last] = torch.arange(len(token), device=row_TK.device)
    if biases_TD:
        # As lanes before all others: a sum starts from 0, and adds rows of any lanes alike.
        numbers = torch.arange(len(biases_TD) * num_tokens, device=row_TK.device)
        later = torch.where(row_TK < 0, -1, row_TK + len(numbers))
        row_TK = torch.cat([numbers.view(len(biases_TD), num_tokens).t(), later], 1)
        rows_HD = torch.cat([*biases_TD, rows_HD])
    assert row_TK.shape[1] == num_topk + len(biases_TD)
    assert rows_HD.shape[1] == hidden
    return _sum(engine, rows_HD, row_TK)


def pick(beside_HK: Tensor, lanes: Lanes) -> Tensor:
    """[T, K]: each lane's number of the row that its expert's rank sent; 0.0 without an expert."""
    (num_tokens, num_topk), device = lanes.rank_TK.shape, lanes.rank_TK.device
    row_TK = lanes.home_rows(lanes.is_last_TK)
    token, lane = lanes.is_last_TK.nonzero(as_tuple=True)
    num_ranks = int(lanes.rank_TK.max()) + 1 if lanes.rank_TK.numel() else 0
    row_TR = torch.full((num_tokens, num_ranks + 1), -1, device=device)
    row_TR[token, lanes.rank_TK[token, lane]] = row_TK[token, lane]
    tokens = torch.arange(num_tokens, device=device)[:, None]
    found = row_TR[tokens, lanes.rank_TK]  # -1 finds the last column, which has no row
    picked = torch.zeros(num_tokens, num_topk, dtype=beside_HK.dtype, device=device)
    token, lane = (found >= 0).nonzero(as_tuple=True)
    picked[token, lane] += beside_HK[found[token, lane], lane]
    return picked


def _sum(engine: Engine, rows_HD: Tensor, row_of: Tensor) -> Tensor:
    out = torch.empty(row_of.shape[0], rows_HD.shape[1], dtype=rows_HD.dtype, device=rows_HD.device)
    first_bad = engine.kernels.unpermute(rows_HD.contiguous(), row_of.contiguous(), None, out)
    assert first_bad < 0
    return out
