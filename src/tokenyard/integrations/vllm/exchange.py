"""One Buffer over ranks that have tokens of their own, and the ids that they know experts by.

vLLM places experts on the ranks of its expert parallel group in consecutive blocks as equal as can
be, which is also what a Buffer assumes. Mostly the Buffer's ranks are that group. Where tensor
parallel ranks all have the same tokens, they are every TP-th rank of it: each of those sends to the
experts that such ranks own, and vLLM adds up what tensor parallel ranks have found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenyard.buffer import Buffer
from tokenyard.integrations.vllm.settings import Settings
from tokenyard.ops.permute import permute, unpermute
from tokenyard.topology import even_split
from tokenyard.types import Handle


class Exchange:
    """ep_ranks are those of the group's ranks in the expert parallel group of ep_size ranks."""

    def __init__(
        self, group: Any, ep_ranks: Sequence[int], ep_size: int, settings: Settings
    ) -> None:
        self.ep_ranks, self.ep_size = tuple(ep_ranks), ep_size
        self.buffer = Buffer(group, transport=settings.transport, timeout=settings.timeout)
        self._ids: dict[int, Tensor | None] = {}

    def num_local_experts(self, num_experts: int) -> int:
        return even_split(num_experts, self.ep_size).count(self.ep_ranks[self.buffer.rank])

    def ids(self, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, int]:
        """The ids that the Buffer knows these experts by, -1 for others; and how many it knows."""
        topk_ids = topk_ids.to(torch.int64)
        if num_experts not in self._ids:
            self._ids[num_experts] = self._table(num_experts)
        table = self._ids[num_experts]
        if table is None:
            return topk_ids, num_experts
        return table[topk_ids], int(table.max()) + 1

    def _table(self, num_experts: int) -> Tensor | None:
        """[E], None where ids are what they are."""
        owner = torch.tensor(even_split(num_experts, self.ep_size))
        known = torch.isin(owner, torch.tensor(self.ep_ranks))
        if known.all():
            return None
        return torch.where(known, known.cumsum(0) - 1, -1)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile, or load, what a request will need: one token to every rank and back."""
        size, hidden = self.buffer.group_size, 128
        topk_ids = torch.arange(size)[None]
        got = self.buffer.dispatch(
            torch.zeros(1, hidden, dtype=dtype),
            topk_idx=topk_ids,
            topk_weights=torch.ones(1, size, dtype=torch.float32),
            num_experts=size,
        )
        x, recv_ids, handle = got.recv_x, got.recv_topk_idx, got.handle
        assert isinstance(x, Tensor)
        assert recv_ids is not None
        assert isinstance(handle, Handle)
        grouped = permute(x, recv_ids, 1)
        rows = self.buffer.get_next_combine_buffer(handle)
        unpermute(grouped.x, grouped.row_of, weights=got.recv_topk_weights, out=rows)
        self.buffer.combine(rows, handle)
