"""What the calls of a Buffer return. All unpack as DeepEP's tuples do."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokenyard.handle import Handle
from tokenyard.runtime.events import EventOverlap

Rows = Tensor | tuple[Tensor, Tensor]


class DispatchLayout(NamedTuple):
    """What get_dispatch_layout returns: who gets each token of this rank.

        num_tokens_per_rank       [R] int32
        num_tokens_per_rdma_rank  [nodes] int32, or None on one node
        num_tokens_per_expert     [E] int32
        is_token_in_rank          [T, R] bool

    It unpacks as DeepEP's tuple does.
    """

    num_tokens_per_rank: Tensor
    num_tokens_per_rdma_rank: Tensor | None
    num_tokens_per_expert: Tensor
    is_token_in_rank: Tensor
    event: EventOverlap


class Dispatched(NamedTuple):
    """What dispatch returns, in DeepEP's order.

        recv_x                           [N, D], or the pair (rows, scales), by (source rank, token)
        recv_topk_idx                    [N, K] local expert ids, -1 where an expert lives elsewhere
        recv_topk_weights                [N, K], 0 there
        num_recv_tokens_per_expert_list  one count a local expert, rounded up to expert_alignment
        handle                           for combine, and for dispatching along the same way again
        event                            when rows can be read, with async_finish

    After a dispatch with a handle all but recv_x and event are None.
    """

    recv_x: Rows
    recv_topk_idx: Tensor | None
    recv_topk_weights: Tensor | None
    num_recv_tokens_per_expert_list: list[int] | None
    handle: Handle | None
    event: EventOverlap


class Combined(NamedTuple):
    """What combine returns: x [T, D], the sums, and topk_weights [T, K] if they were given."""

    x: Tensor
    topk_weights: Tensor | None
    event: EventOverlap


class DispatchedByExpert(NamedTuple):
    """What dispatch_by_expert returns, and says."""

    x: Rows
    offsets: Tensor
    num_tokens_per_expert: list[int]
    handle: Handle


class Gathered(NamedTuple):
    """What all_gather returns: the rows of all ranks, and the handle by which sums come back."""

    x: Tensor
    handle: Handle
