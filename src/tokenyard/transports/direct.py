"""Ranks that share memory write each row where it belongs in the receiver's: one copy.

The receiver owns placement. With its words of the agreement it names a segment, as large as its
largest dispatch of late needed. Once counts are known every rank can tell whose segment has room.
If one has none, all ranks name segments that fit in a second round. The user gets what was received
where it lies, and the segment is used again once those tensors have died. Rows by expert are taken
by their receiver instead. Combine moves nothing: rows that lie in shared memory already, or are
copied there, are read by the ranks that sum them.

It is the default where all ranks share a machine. It takes memory for every result in full. Its
exchanges are compiled calls as a whole (`engine.calls`), so it has no `send` and no `sum_back`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenyard.kernels.base import SharingKernels
from tokenyard.shm.node import SharedNode
from tokenyard.transports.base import SharedMemoryTransport
from tokenyard.types import Route


class DirectTransport(SharedMemoryTransport):
    name = "direct"
    offers_memory = True

    def __init__(
        self, node: SharedNode, kernels: SharingKernels, node_of_rank: Sequence[int]
    ) -> None:
        self.node = self._node = node
        self._kernels = kernels
        self._is_one_node = not any(node_of_rank)
        self.rank, self.size = node.rank, node.size

    def list_by_lane(self, route: Route, topk_idx_TK: Tensor, rank_of_expert_E: Tensor) -> bool:
        if not self._is_one_node:  # each node's rows are summed first, by rank
            return False
        self._kernels.list_by_lane(route, topk_idx_TK.contiguous(), rank_of_expert_E)
        return True
