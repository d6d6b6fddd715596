"""The handle of a compiled dispatch between nodes: numbers as they came, tensors when asked for."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from tokenyard.engine.handle import CompiledHandle
from tokenyard.kernels.base import RowKernels
from tokenyard.topology import Topology
from tokenyard.transports.hierarchical.route import KnownMarks
from tokenyard.types import Flow, Origin

_new = object.__new__


class NodesHandle(CompiledHandle):
    """`made` makes one. Its constructor is Handle's, whose fields are given: then there are no
    marks.
    """

    marks_TR: np.ndarray | None = None  # bool: which ranks get each token of this rank
    tally_3R: np.ndarray  # int64, by source: its tokens, its rows for this rank, records here
    bits: np.ndarray  # uint8: which ranks of this node get each token of all ranks, as parcels have
    _tokens_N: Tensor
    _topology: Topology
    _kernels: RowKernels

    @staticmethod
    def made(
        origin: Origin,
        call: int,
        shape: tuple[int, torch.dtype, int],
        marks_TR: np.ndarray,
        tally_3R: np.ndarray,
        bits: np.ndarray,
        tokens_N: Tensor,
        rank: int,
        topology: Topology,
        kernels: RowKernels,
    ) -> NodesHandle:
        """`shape` is the hidden size, the dtype that combine takes, and the number of channels."""
        self = _new(NodesHandle)
        self.origin, self.call = origin, call
        self.hidden, self.combine_dtype, self.num_channels = shape
        self.marks_TR, self.tally_3R, self.bits = marks_TR, tally_3R, bits
        self.num_rows, self._tokens_N = tokens_N.shape[0], tokens_N
        self._rank, self._topology, self._kernels = rank, topology, kernels
        return self

    @property
    def num_tokens(self) -> int:
        return self.is_token_in_rank.shape[0] if self.marks_TR is None else len(self.marks_TR)

    @cached_property
    def flow(self) -> Flow:  # type: ignore[override]
        assert self.marks_TR is not None
        tokens_R, counts_R, _ = self.tally_3R
        each = -(-len(self._topology.ranks_of_node[self._topology.node_of_rank[self._rank]]) // 8)
        ends = accumulate((each * tokens_R).tolist(), initial=0)
        bits_R = [self.bits[begin:end] for begin, end in pairwise(ends)]
        return Flow(
            self._kernels.route(self.is_token_in_rank),
            tuple(counts_R.tolist()),
            self.num_rows,
            tokens_R,
            None,
            None,
            int(tokens_R.sum()),
            KnownMarks(self.marks_TR, bits_R, self._topology, self._rank),
        )

    @cached_property
    def is_token_in_rank(self) -> Tensor:  # type: ignore[override]
        assert self.marks_TR is not None
        return torch.from_numpy(self.marks_TR)

    @cached_property
    def recv_src_idx(self) -> Tensor:  # type: ignore[override]
        return self._tokens_N
