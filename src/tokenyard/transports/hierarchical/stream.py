"""The two row exchanges over two levels, as streams of chunks between nodes.

`DispatchStream` packs this rank's tokens for the other nodes, writes rows for its own node while
chunks travel, and writes the rows that come to their places in the results of its node's ranks.
`CombineStream` sums the rows that this node's ranks have for a partner's tokens and sends the sums;
to the sums that come it adds the rows of its own node and the biases. Both write each row once, to
its final place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from tokenyard.kernels.base import SharingKernels
from tokenyard.runtime.memory import as_bytes
from tokenyard.transports.base import Sum
from tokenyard.transports.hierarchical.route import Relay, TwoLevelRoute, chunk_tokens
from tokenyard.types import Route


class _Stream:
    """What both streams have in common."""

    def __init__(
        self, path: TwoLevelRoute, width: int, kernels: SharingKernels, beat: Callable[[], None]
    ) -> None:
        self._path, self.width, self._kernels, self._beat = path, width, kernels, beat
        self._chunks = path.chunks(chunk_tokens(width))

    def num_chunks(self, rail: int) -> int:
        return self._chunks.num_chunks[rail]

    def meanwhile(self, chunk: int) -> None:
        pass

    def _counts(self, rail: int, chunk: int) -> tuple[list[int], list[int]]:
        """For each node the rows of this rank's tokens in a chunk, and of its partners' tokens."""
        relayed = self._chunks.relayed[rail][chunk]
        own = self._chunks.sent[chunk] if rail == self._path.own_rail else [0] * len(relayed)
        return own, relayed


class DispatchStream(_Stream):
    def __init__(
        self,
        path: TwoLevelRoute,
        columns: Sequence[Tensor],
        blocks_L: np.ndarray,
        rows_L: np.ndarray,
        kernels: SharingKernels,
        beat: Callable[[], None],
    ) -> None:
        """`blocks_L` is where each local rank's result begins, `rows_L` how many rows it has."""
        self._blocks_L, self._rows_L = blocks_L, rows_L
        self._bytes = [as_bytes(column) for column in columns]
        super().__init__(path, sum(column.shape[1] for column in self._bytes), kernels, beat)
        self._sent = np.cumsum([0] + [sum(chunk) for chunk in self._chunks.sent]).tolist()
        # By hop, for rows of the own node: only hops that are its ranks have memory here.
        self._hops_H = [np.zeros(len(path.hops.node_of_hop), np.int64) for _ in range(3)]
        for table, values in zip(self._hops_H, (blocks_L, path.starts, rows_L)):
            table[path.hops.own] = values

    def counts(self, rail: int, chunk: int) -> tuple[list[int], list[int]]:
        return self._counts(rail, chunk)

    def fill(self, rail: int, chunk: int, rows_NB: Tensor) -> None:
        if len(rows_NB) == 0:
            return
        tokens = self._chunks.order[self._sent[chunk] : self._sent[chunk + 1]]
        for column, part in zip(self._bytes, self._parts(rows_NB)):
            self._kernels.pack(column, tokens, part)

    def meanwhile(self, chunk: int) -> None:
        begin = chunk * self._chunks.tokens
        end = begin + self._chunks.tokens
        columns = [column[begin:end] for column in self._bytes]
        if len(columns[0]):
            self._kernels.scatter(
                columns, _tokens(self._path.hops.route, begin, end), *self._hops_H
            )

    def take(self, rail: int, chunk: int, rows_NB: Tensor) -> None:
        counts = self._chunks.relayed[rail][chunk]
        by_node = rows_NB.split(counts)
        for relay in self._path.relays[rail]:
            if counts[relay.node]:
                first = _first(relay, chunk * self._chunks.tokens)
                route = _tokens(relay.route, first, first + counts[relay.node])
                columns = self._parts(by_node[relay.node])
                self._kernels.scatter(columns, route, self._blocks_L, relay.starts, self._rows_L)
        self._beat()

    def _parts(self, rows_NB: Tensor) -> tuple[Tensor, ...]:
        return rows_NB.split([column.shape[1] for column in self._bytes], dim=1)


class CombineStream(_Stream):
    def __init__(
        self,
        path: TwoLevelRoute,
        one: Sum,
        bases_L: np.ndarray,
        kernels: SharingKernels,
        beat: Callable[[], None],
    ) -> None:
        """`bases_L` is where each local rank's rows begin."""
        self._sum, self._bases_L = one, bases_L
        width = one.rows_ND.shape[1] * one.rows_ND.element_size()
        super().__init__(path, width, kernels, beat)

    def counts(self, rail: int, chunk: int) -> tuple[list[int], list[int]]:
        own, relayed = self._counts(rail, chunk)
        return relayed, own

    def fill(self, rail: int, chunk: int, rows_NB: Tensor) -> None:
        """Sum this node's rows for each partner's tokens, and round."""
        counts = self._chunks.relayed[rail][chunk]
        by_node = rows_NB.view(self._sum.rows_ND.dtype).split(counts)
        for relay in self._path.relays[rail]:
            if counts[relay.node]:
                first = _first(relay, chunk * self._chunks.tokens)
                self._kernels.reduce_at(
                    self._bases_L + relay.starts * self.width,
                    _tokens(relay.route, first, first + counts[relay.node]),
                    [0] * len(self._bases_L),
                    (),
                    by_node[relay.node],
                )

    def take(self, rail: int, chunk: int, rows_NB: Tensor) -> None:
        """Add up the sums of other nodes, the rows of this rank's own node, and the biases."""
        self._beat()
        begin = chunk * self._chunks.tokens
        end = begin + self._chunks.tokens
        out_TD = self._sum.out_TD[begin:end]
        if rail != self._path.own_rail or len(out_TD) == 0:
            return
        path = self._path
        bases_H = np.zeros(len(path.hops.node_of_hop), np.int64)
        bases_H[path.hops.own] = self._bases_L + path.starts * self.width
        at = rows_NB.data_ptr()
        for node, hop in enumerate(path.hops.hop_of_node):
            if hop >= 0:  # where row 0 would be if the rows of all chunks before were there, too
                bases_H[hop] = at - int(self._chunks.first_hop[chunk, node]) * self.width
                at += self._chunks.sent[chunk][node] * self.width
        biases = [bias[begin:end] for bias in self._sum.biases_TD]
        route = _tokens(path.hops.route, begin, end)
        self._kernels.reduce_at(bases_H, route, path.hops.node_of_hop, biases, out_TD)


def _first(relay: Relay, token: int) -> int:
    """How many of the partner's rows come before this token of it."""
    return int(relay.before[min(token, len(relay.before) - 1)])


def _tokens(route: Route, begin: int, end: int) -> Route:
    """The part of a route that is about some tokens, for kernels that go by tokens."""
    starts = route.copy_start[begin : end + 1]
    first, last = int(starts[0]), int(starts[-1])
    return route._replace(
        copy_start=starts - first,
        copy_rank=route.copy_rank[first:last],
        copy_slot=route.copy_slot[first:last],
    )
