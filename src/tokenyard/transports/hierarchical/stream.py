"""The two row exchanges over two levels, as streams of chunks between nodes.

Out: this rank's tokens are packed for the other nodes, and what comes is written to where it
belongs in the results of this node's ranks. Back: what this node's ranks have for a partner's
tokens is summed and sent, and what comes is added to the tokens that it belongs to. Meanwhile rows
of the own node are moved. Rows never wait for another order: on both ways each is written once, to
its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from tokenyard.runtime.memory import as_bytes
from tokenyard.transports.base import Sum
from tokenyard.transports.direct import DirectKernels
from tokenyard.transports.hierarchical.route import Relay, TwoLevelRoute
from tokenyard.types import Route


class DispatchStream:
    def __init__(
        self,
        path: TwoLevelRoute,
        columns: Sequence[Tensor],
        blocks_L: np.ndarray,
        kernels: DirectKernels,
        beat: Callable[[], None],
    ) -> None:
        """`blocks_L` is where each local rank's result begins."""
        self._path, self._columns, self._blocks_L = path, columns, blocks_L
        self._kernels, self._beat = kernels, beat
        self._bytes = [as_bytes(column) for column in columns]
        self.width = sum(column.shape[1] for column in self._bytes)
        self._chunks = path.chunks(self.width)
        self._sent = np.cumsum([0] + [sum(chunk) for chunk in self._chunks.sent]).tolist()
        # Rows of the own node: of all hops only its ranks have memory here.
        self._hops_H = [np.zeros(len(path.hops.node_of_hop), np.int64) for _ in range(3)]
        for table, values in zip(self._hops_H, (blocks_L, path.starts, path.num_rows)):
            table[path.hops.own] = values

    def num_chunks(self, rail: int) -> int:
        return self._chunks.num_chunks[rail]

    def counts(self, rail: int, chunk: int) -> tuple[list[int], list[int]]:
        sends = rail == self._path.own_rail
        relayed = self._chunks.relayed[rail][chunk]
        return self._chunks.sent[chunk] if sends else [0] * len(relayed), relayed

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
                self._kernels.scatter(
                    columns, route, self._blocks_L, relay.starts, self._path.num_rows
                )
        self._beat()

    def _parts(self, rows_NB: Tensor) -> tuple[Tensor, ...]:
        return rows_NB.split([column.shape[1] for column in self._bytes], dim=1)


class CombineStream:
    def __init__(
        self,
        path: TwoLevelRoute,
        one: Sum,
        bases_L: np.ndarray,
        kernels: DirectKernels,
        beat: Callable[[], None],
    ) -> None:
        """`bases_L` is where each local rank's rows begin."""
        self._path, self._sum, self._bases_L = path, one, bases_L
        self._kernels, self._beat = kernels, beat
        self.width = one.rows_ND.shape[1] * one.rows_ND.element_size()
        self._chunks = path.chunks(self.width)

    def num_chunks(self, rail: int) -> int:
        return self._chunks.num_chunks[rail]

    def counts(self, rail: int, chunk: int) -> tuple[list[int], list[int]]:
        sends = rail == self._path.own_rail
        relayed = self._chunks.relayed[rail][chunk]
        return relayed, self._chunks.sent[chunk] if sends else [0] * len(relayed)

    def fill(self, rail: int, chunk: int, rows_NB: Tensor) -> None:
        """The sums of this node's rows, rounded, for each partner's tokens."""
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

    def meanwhile(self, chunk: int) -> None: ...

    def take(self, rail: int, chunk: int, rows_NB: Tensor) -> None:
        """Add up what other nodes sent, rows of the own node, and biases."""
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
            if hop >= 0:  # as if all rows of the chunks before were there as well
                bases_H[hop] = at - int(self._chunks.first_hop[chunk, node]) * self.width
                at += self._chunks.sent[chunk][node] * self.width
        biases = [bias[begin:end] for bias in self._sum.biases_TD]
        route = _tokens(path.hops.route, begin, end)
        self._kernels.reduce_at(bases_H, route, path.hops.node_of_hop, biases, out_TD)


def _first(relay: Relay, token: int) -> int:
    """The partner's rows before this token of it."""
    return int(relay.before[min(token, len(relay.before) - 1)])


def _tokens(route: Route, begin: int, end: int) -> Route:
    """The copies of some tokens, for kernels that go by tokens."""
    starts = route.copy_start[begin : end + 1]
    first, last = int(starts[0]), int(starts[-1])
    return route._replace(
        copy_start=starts - first,
        copy_rank=route.copy_rank[first:last],
        copy_slot=route.copy_slot[first:last],
    )
