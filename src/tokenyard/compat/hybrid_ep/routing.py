"""The routing of HybridEP: maps [T, E] of tokens and experts, and what a dispatch remembers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.results import Handle


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """(routing_map [T, E] bool, probs [T, E] float32 or None) of the experts in topk_idx [T, K].

    -1 means no expert. Of an expert that a token lists twice, the last weight counts.

    >>> topk_idx, topk_weights = torch.tensor([[2, 0], [1, -1]]), torch.tensor([[0.5, 0.25]] * 2)
    >>> routing_map, probs = indices_to_map(topk_idx, topk_weights, 2, 3)
    >>> routing_map.int().tolist(), probs.tolist()
    ([[1, 0, 1], [0, 1, 0]], [[0.25, 0.0, 0.5], [0.0, 0.5, 0.0]])
    """
    topk_idx = validate.topk_ids("topk_idx", topk_idx, num_tokens=num_of_tokens, device=None)
    outside = (topk_idx < -1) | (topk_idx >= num_of_experts)
    if outside.any():
        raise validate.bad_expert(topk_idx, int(outside.flatten().nonzero()[0]), num_of_experts)
    shape, device = (num_of_tokens, num_of_experts + 1), topk_idx.device  # the last is for -1
    if topk_weights is not None:
        topk_weights = validate.tensor(
            "topk_weights",
            topk_weights,
            shape=topk_idx.shape,
            dtypes=validate.SUMMABLE,
            device=device,
        )
    routing_map = torch.zeros(shape, dtype=torch.bool, device=device)
    probs = torch.zeros(shape, dtype=torch.float32, device=device)
    token = torch.arange(num_of_tokens, device=device)
    for k in range(topk_idx.shape[1]):  # one by one, so that the last of two weights wins
        routing_map[token, topk_idx[:, k]] = True
        if topk_weights is not None:
            probs[token, topk_idx[:, k]] = topk_weights[:, k].float()
    kept = probs[:, :-1].contiguous() if topk_weights is not None else None
    return routing_map[:, :-1].contiguous(), kept


@dataclass(frozen=True, kw_only=True, eq=False)
class HybridRoute:
    """The way of one dispatch. P pairs, by (token, expert), each in a lane k of its token."""

    handle: Handle  # of the Buffer, with K lanes
    token_P: Tensor
    expert_P: Tensor
    lane_P: Tensor
    num_experts: int
    num_topk: int  # K, the most experts that a token of any rank has
    num_rows: int  # of the result
    may_drop: bool  # rows, on any rank: all of them have to combine in the same way
    row_of: Tensor  # [N, K] int64, a received pair's row, -1 where there is none
    num_tokens_per_expert: Tensor  # [L] int64, padding included

    def by_lane(self, values_TE: Tensor) -> Tensor:
        """[T, K]: the pairs' values, zeros in lanes without an expert."""
        lanes_TK = values_TE.new_zeros(values_TE.shape[0], self.num_topk)
        lanes_TK[self.token_P, self.lane_P] = values_TE[self.token_P, self.expert_P]
        return lanes_TK

    def by_map(self, lanes_TK: Tensor) -> Tensor:
        """[T, E]: the way back of by_lane."""
        values_TE = lanes_TK.new_zeros(lanes_TK.shape[0], self.num_experts)
        values_TE[self.token_P, self.expert_P] = lanes_TK[self.token_P, self.lane_P]
        return values_TE

    def by_row(self, lanes_NK: Tensor) -> Tensor:
        """[M]: received values in the order of rows; one more place takes those without a row."""
        values = lanes_NK.new_zeros(self.num_rows + 1)
        values[self.row_of] = lanes_NK
        values[-1] = 0
        return values[:-1]

    def by_received_lane(self, values_M: Tensor) -> Tensor:
        """[N, K]: the way back of by_row."""
        return torch.cat([values_M, values_M.new_zeros(1)])[self.row_of]


class HybridHandle(NamedTuple):
    """HybridEP's eleven fields. The maps of its kernels are None; `config` holds our own route."""

    sparse_to_dense_map: None
    rdma_to_attn_map: None
    attn_to_rdma_map: None
    num_dispatched_tokens_tensor: Tensor  # [1] int32, tokens that this rank got
    local_expert_routing_map: None
    dense_chunk_layout: None
    dense_to_expert_map: Tensor  # [N, K] int64, the rows of each token that this rank got
    tokens_per_expert: Tensor  # [L] int32, without padding
    num_of_tokens_per_rank: int
    config: HybridRoute
    overflow_flag: Tensor  # [1] int32, 1 if rows were dropped


def route_of(handle: Sequence[Any] | None) -> HybridRoute:
    """What a handle holds, also if it comes as a plain tuple."""
    route = handle[-2] if isinstance(handle, tuple) and len(handle) == 11 else None
    if not isinstance(route, HybridRoute):
        raise ValueError(
            f"handle is {validate.kind(handle)}, want one that dispatch_with_permute returned"
        )
    return route


def checked_map(
    hidden: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    num_experts: int | None,
    routing_map: Tensor | None,
    probs: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The map and the probs of a call, which may have been given as lists."""
    num_tokens = hidden.shape[0]
    if routing_map is None:
        if topk_idx is None:
            raise ValueError("routing_map, topk_idx and handle are None, want one of them")
        num_experts = validate.num_experts(num_experts, None)
        return indices_to_map(topk_idx, topk_weights, num_tokens, num_experts)
    routing_map = validate.tensor(
        "routing_map",
        routing_map,
        shape=(num_tokens, "experts"),
        dtypes=(torch.bool,),
        device=hidden.device,
    )
    return routing_map, checked_probs(probs, routing_map.shape, hidden.device)


def checked_probs(
    probs: Tensor | None, shape: Sequence[int], device: torch.device
) -> Tensor | None:
    if probs is None:
        return None
    return validate.tensor("probs", probs, shape=shape, dtypes=(torch.float32,), device=device)
