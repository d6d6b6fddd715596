"""A handle's fields as DeepEP V1 names and orders them: six on one node, ten on several.

Nothing here needs them: they are computed when they are first read. Fields that depend on the rows
that arrive wait for them. The first field has fresh memory at each read by its place, by which the
tuple is known again (`v1_tuple`).

With several nodes the prefix matrices of one node are None: they would take O(R * R). Of V1's ten
fields there, four say what a rank passes on for others: recv_rdma_channel_prefix_matrix,
recv_rdma_rank_prefix_sum, recv_src_meta and send_nvl_head. They are None, since which rank passes
rows on, if any does, is the transport's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tokenyard.compat import v1_tuple
from tokenyard.types import split_range

if TYPE_CHECKING:
    from tokenyard.results import Handle

_ONE_NODE = (
    "rank_prefix_matrix",
    "channel_prefix_matrix",
    "recv_channel_prefix_matrix",
    "recv_src_idx",
    "is_token_in_rank",
    "send_head",
)
_SEVERAL_NODES = (
    "is_token_in_rank",
    "rdma_channel_prefix_matrix",
    "gbl_channel_prefix_matrix",
    "recv_rdma_channel_prefix_matrix",
    "recv_rdma_rank_prefix_sum",
    "recv_gbl_channel_prefix_matrix",
    "recv_gbl_rank_prefix_sum",
    "recv_src_meta",
    "send_rdma_head",
    "send_nvl_head",
)


def names(nodes: tuple[int, ...]) -> tuple[str, ...]:
    """The names of the fields in V1's order, where ranks are on these nodes."""
    return _ONE_NODE if len(set(nodes)) == 1 else _SEVERAL_NODES


def at(handle: Handle, place: int) -> Tensor | None:
    """The field at this place."""
    fields = handle.v1_fields
    name = fields[place]
    value: Tensor | None = getattr(handle, name)
    if name != fields[0]:
        return value
    assert value is not None
    return v1_tuple.issue(handle, value)


find = v1_tuple.find


def read(handle: Handle, name: str) -> Tensor | None:
    """A field that only V1 has. Raises AttributeError for any other name."""
    if name not in _MADE:
        raise AttributeError(f"'{type(handle).__name__}' object has no attribute {name!r}")
    make = _MADE[name]
    return None if make is None else make(handle)


def _rank_prefix_matrix(handle: Handle) -> Tensor | None:
    """[R, R] int32: the rows of destination j from sources 0..i."""
    sent_RR = handle.flow.sent_RR
    if any(handle.nodes):
        return None
    assert sent_RR is not None
    return torch.from_numpy(sent_RR.cumsum(0, np.int32)).to(handle.ledger.src_idx.device)


def _channel_prefix_matrix(handle: Handle) -> Tensor | None:
    """The numbers of gbl_channel_prefix_matrix, under their name on one node."""
    return None if any(handle.nodes) else _gbl_channel_prefix_matrix(handle)


def _recv_channel_prefix_matrix(handle: Handle) -> Tensor | None:
    """[R, C] int32: where each source's channels begin, the receiving side."""
    return None if any(handle.nodes) else _recv_channels(handle)


def _send_head(handle: Handle) -> Tensor:
    """[T, R] int32: the row's place in its channel's ring, -1 where not sent."""
    return _heads(handle, handle.is_token_in_rank)


def _gbl_channel_prefix_matrix(handle: Handle) -> Tensor:
    """[R, C] int32: the rows for each rank in this channel and those before it."""
    return _upto_channels(handle, handle.is_token_in_rank)


def _rdma_channel_prefix_matrix(handle: Handle) -> Tensor:
    """[nodes, C] int32: the tokens for each node in this channel and those before it."""
    return _upto_channels(handle, _is_token_in_node(handle))


def _recv_gbl_channel_prefix_matrix(handle: Handle) -> Tensor:
    """[R, C] int32: the row at which each source's channel begins."""
    starts = _recv_gbl_rank_prefix_sum(handle).roll(1)
    starts[0] = 0
    return _recv_channels(handle) + starts[:, None]


def _recv_gbl_rank_prefix_sum(handle: Handle) -> Tensor:
    """[R] int32: the rows from sources 0..i."""
    counts = torch.tensor(handle.flow.recv_counts, dtype=torch.int32, device="cpu")
    return counts.cumsum(0, dtype=torch.int32).to(handle.ledger.src_idx.device)


def _send_rdma_head(handle: Handle) -> Tensor:
    """[T, nodes] int32: a token's place among those of its channel for a node, -1 for none."""
    return _heads(handle, _is_token_in_node(handle))


_MADE: dict[str, Callable[[Handle], Tensor | None] | None] = {
    "rank_prefix_matrix": _rank_prefix_matrix,
    "channel_prefix_matrix": _channel_prefix_matrix,
    "recv_channel_prefix_matrix": _recv_channel_prefix_matrix,
    "send_head": _send_head,
    "rdma_channel_prefix_matrix": _rdma_channel_prefix_matrix,
    "gbl_channel_prefix_matrix": _gbl_channel_prefix_matrix,
    "recv_gbl_channel_prefix_matrix": _recv_gbl_channel_prefix_matrix,
    "recv_gbl_rank_prefix_sum": _recv_gbl_rank_prefix_sum,
    "send_rdma_head": _send_rdma_head,
    "recv_rdma_channel_prefix_matrix": None,
    "recv_rdma_rank_prefix_sum": None,
    "recv_src_meta": None,
    "send_nvl_head": None,
}


def _is_token_in_node(handle: Handle) -> Tensor:
    in_rank_TR = handle.is_token_in_rank
    nodes = torch.tensor(handle.nodes, device=in_rank_TR.device)
    each = [in_rank_TR[:, nodes == node].any(1) for node in range(1 + max(handle.nodes))]
    return torch.stack(each, 1)


def _upto_channels(handle: Handle, sent_TR: Tensor) -> Tensor:
    upto_TR = sent_TR.cumsum(0, dtype=torch.int32)
    ends = [end for _, end in split_range(handle.num_tokens, handle.num_channels)]
    none = upto_TR.new_zeros(1, upto_TR.shape[1])
    return torch.cat([none, upto_TR])[ends].t().contiguous()


def _recv_channels(handle: Handle) -> Tensor:
    flow, begins = handle.flow, []
    tokens_by_source = handle.recv_src_idx[: flow.num_received].split(flow.recv_counts)
    for tokens, num_tokens in zip(tokens_by_source, flow.tokens_R.tolist()):
        first = [begin for begin, _ in split_range(num_tokens, handle.num_channels)]
        at = torch.tensor(first, device=tokens.device)
        begins.append(torch.searchsorted(tokens, at, out_int32=True))
    return torch.stack(begins)


def _heads(handle: Handle, sent_TR: Tensor) -> Tensor:
    head = torch.full(sent_TR.shape, -1, dtype=torch.int32, device=sent_TR.device)
    for begin, end in split_range(handle.num_tokens, handle.num_channels):
        part = sent_TR[begin:end]
        place = part.cumsum(0, dtype=torch.int32) - 1
        head[begin:end] = torch.where(part, place, -1)
    return head
