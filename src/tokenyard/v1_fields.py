"""A handle's fields as DeepEP V1 names and orders them: six on one node, ten on several.

Nothing here needs them: they are computed when they are first read.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard import v1_tuple

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


class V1Fields:
    """What a Handle shows of itself to readers of V1's tuple.

    `handle[0]` is V1's first field, and all of them unpack in V1's order. Fields that depend on the
    rows that arrive wait for them, as does unpacking. The first field has fresh memory at each
    read, by which the tuple is known again.

    With several nodes the prefix matrices of one node are None: they would take O(R * R). Of V1's
    ten fields there, four say what a rank passes on for others: recv_rdma_channel_prefix_matrix,
    recv_rdma_rank_prefix_sum, recv_src_meta and send_nvl_head. They are None, since which rank
    passes rows on, if any does, is the transport's affair.
    """

    flow: Any
    num_channels: int
    is_token_in_rank: Tensor
    recv_src_idx: Tensor
    recv_rdma_channel_prefix_matrix = recv_rdma_rank_prefix_sum = None
    recv_src_meta = send_nvl_head = None

    @property
    def num_tokens(self) -> int:
        raise NotImplementedError

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until rows have arrived."""
        raise NotImplementedError

    @property
    def v1_fields(self) -> tuple[str, ...]:
        """Their names, in V1's order."""
        return _ONE_NODE if len(set(self.nodes)) == 1 else _SEVERAL_NODES

    @cached_property
    def rank_prefix_matrix(self) -> Tensor | None:
        """[R, R] int32: the rows of destination j from sources 0..i."""
        sent_RR = self.flow.sent_RR
        if sent_RR is None:
            return None
        return torch.from_numpy(sent_RR.cumsum(0, np.int32)).to(self.recv_src_idx.device)

    @cached_property
    def channel_prefix_matrix(self) -> Tensor | None:
        """[R, C] int32: the rows for each rank in this channel and those before it."""
        if self.flow.sent_RR is None:
            return None
        return self._upto_channels(self.is_token_in_rank)

    @cached_property
    def recv_channel_prefix_matrix(self) -> Tensor | None:
        """[R, C] int32: where each source's channels begin, the receiving side."""
        if self.flow.sent_RR is None:
            return None
        return self._recv_channels()

    @cached_property
    def send_head(self) -> Tensor:
        """[T, R] int32: the row's place in its channel's ring, -1 where not sent."""
        return self._heads(self.is_token_in_rank)

    @cached_property
    def gbl_channel_prefix_matrix(self) -> Tensor:
        """[R, C] int32: the rows for each rank in this channel and those before it."""
        return self._upto_channels(self.is_token_in_rank)

    @cached_property
    def rdma_channel_prefix_matrix(self) -> Tensor:
        """[nodes, C] int32: the tokens for each node in this channel and those before it."""
        return self._upto_channels(self._is_token_in_node())

    @cached_property
    def recv_gbl_channel_prefix_matrix(self) -> Tensor:
        """[R, C] int32: the row at which each source's channel begins."""
        starts = self.recv_gbl_rank_prefix_sum.roll(1)
        starts[0] = 0
        return self._recv_channels() + starts[:, None]

    @cached_property
    def recv_gbl_rank_prefix_sum(self) -> Tensor:
        """[R] int32: the rows from sources 0..i."""
        counts = torch.tensor(self.flow.recv_counts, dtype=torch.int32, device="cpu")
        return counts.cumsum(0, dtype=torch.int32).to(self.recv_src_idx.device)

    @cached_property
    def send_rdma_head(self) -> Tensor:
        """[T, nodes] int32: a token's place among those of its channel for a node, -1 for none."""
        return self._heads(self._is_token_in_node())

    def _is_token_in_node(self) -> Tensor:
        nodes = torch.tensor(self.nodes, device=self.is_token_in_rank.device)
        each = [
            self.is_token_in_rank[:, nodes == node].any(1) for node in range(1 + max(self.nodes))
        ]
        return torch.stack(each, 1)

    def _upto_channels(self, sent_TR: Tensor) -> Tensor:
        upto_TR = sent_TR.cumsum(0, dtype=torch.int32)
        ends = [end for _, end in split_range(self.num_tokens, self.num_channels)]
        none = upto_TR.new_zeros(1, upto_TR.shape[1])
        return torch.cat([none, upto_TR])[ends].t().contiguous()

    def _recv_channels(self) -> Tensor:
        self.wait()
        begins = []
        tokens_by_source = self.recv_src_idx[: self.flow.num_received].split(self.flow.recv_counts)
        for tokens, num_tokens in zip(tokens_by_source, self.flow.tokens_R.tolist()):
            first = [begin for begin, _ in split_range(num_tokens, self.num_channels)]
            at = torch.tensor(first, device=tokens.device)
            begins.append(torch.searchsorted(tokens, at, out_int32=True))
        return torch.stack(begins)

    def _heads(self, sent_TR: Tensor) -> Tensor:
        head = torch.full(sent_TR.shape, -1, dtype=torch.int32, device=sent_TR.device)
        for begin, end in split_range(self.num_tokens, self.num_channels):
            part = sent_TR[begin:end]
            place = part.cumsum(0, dtype=torch.int32) - 1
            head[begin:end] = torch.where(part, place, -1)
        return head

    def __len__(self) -> int:
        return len(self.v1_fields)

    def __iter__(self) -> Iterator[Tensor | None]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        fields = self.v1_fields
        if isinstance(index, slice):
            return tuple(self[place] for place in range(len(fields))[index])
        name = fields[index]
        if name == "recv_src_idx":
            self.wait()
        value = getattr(self, name)
        return v1_tuple.issue(self, value) if name == fields[0] else value


def split_range(num_items: int, num_parts: int) -> list[tuple[int, int]]:
    """Each part takes ceil(items / parts) consecutive items; the last parts may get none.

    >>> split_range(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    each = -(-num_items // num_parts)
    starts = (min(part * each, num_items) for part in range(num_parts))
    return [(begin, min(begin + each, num_items)) for begin in starts]
