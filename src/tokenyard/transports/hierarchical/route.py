"""The route of a dispatch over two levels, as one rank knows it.

A token goes once to each other node that needs it, to this rank's partner there, and straight to
the ranks of its own node. So a rank has two tasks in a dispatch: it sends its own tokens, and it
passes on what its partners in other nodes send it. Each task has a `Route`:

    hops    where this rank's tokens go first. A *hop* is a rank of its own node, or another node;
            hops are in the order of nodes
    relays  for each partner: where its tokens that need this node go, among the ranks of this node

Rows travel in *chunks*. A chunk is a range of its source's tokens, so sender and receiver know
which rows are in it, and all rows of a token are in one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard.kernels.base import RowKernels
from tokenyard.topology import Topology
from tokenyard.types import Route
from tokenyard.wire.nodes_table import CAME_BITS, CAME_TOKENS, FACTS

_CHUNK = 1 << 20  # bytes of a source's tokens that travel together


def chunk_tokens(width: int) -> int:
    """How many tokens a chunk has if a row has so many bytes: the same on all ranks."""
    return max(1, _CHUNK // width)


class Relay(NamedTuple):
    """The tokens of a partner that this rank passes on to its node."""

    node: int  # of the partner
    route: Route  # its rows, as they come, to the ranks of this node
    before: np.ndarray  # [T + 1] the rows of tokens 0..t-1
    starts: np.ndarray  # [L] where its rows begin in each local rank's result


class Hops(NamedTuple):
    """Where the tokens of this rank go first."""

    route: Route
    node_of_hop: list[int]
    hop_of_node: list[int]  # -1 for this rank's own node
    own: list[int]  # the hops that are ranks of its own node


class Chunks(NamedTuple):
    """A route, cut into ranges of so many tokens."""

    tokens: int
    order: Tensor  # int32, this rank's tokens as they go to other nodes, by (chunk, node, token)
    sent: list[list[int]]  # [chunk][node] rows that this rank sends
    relayed: dict[int, list[list[int]]]  # [rail][chunk][node] rows that come to be passed on
    first_hop: np.ndarray  # [chunks + 1, nodes] rows to each node in the chunks before
    num_chunks: dict[int, int]  # by rail


@dataclass(eq=False)
class TwoLevelRoute:
    topology: Topology
    own_rail: int
    num_tokens: dict[int, int]  # by rail: the most tokens that a rank on it has
    hops: Hops
    relays: dict[int, list[Relay]]  # by rail, then by node
    starts: np.ndarray  # [L] where this rank's own rows begin in each local rank's result
    _chunks: dict[int, Chunks] = field(default_factory=dict)

    def chunks(self, tokens: int) -> Chunks:
        """The route in chunks of so many tokens."""
        if tokens not in self._chunks:
            self._chunks[tokens] = self._cut(tokens)
        return self._chunks[tokens]

    def _cut(self, tokens: int) -> Chunks:
        num_chunks = {rail: max(1, -(-most // tokens)) for rail, most in self.num_tokens.items()}
        relayed = {}
        for rail, relays in self.relays.items():
            cuts = np.arange(num_chunks[rail] + 1) * tokens
            by_node = np.zeros((num_chunks[rail], self.topology.num_nodes), np.int64)
            for relay in relays:
                upto = relay.before[np.minimum(cuts, len(relay.before) - 1)]
                by_node[:, relay.node] = np.diff(upto)
            relayed[rail] = by_node.tolist()
        cuts = np.arange(num_chunks[self.own_rail] + 1) * tokens
        first_hop = np.zeros((len(cuts), self.topology.num_nodes), np.int64)
        of_hop = self.hops.route.send_token.split(list(self.hops.route.send_counts))
        order = []
        for node, hop in enumerate(self.hops.hop_of_node):
            if hop >= 0:
                first_hop[:, node] = np.searchsorted(of_hop[hop].numpy(), cuts)
        for begin, end in pairwise(first_hop.tolist()):
            for node, hop in enumerate(self.hops.hop_of_node):
                if hop >= 0:
                    order.append(of_hop[hop][begin[node] : end[node]])
        flat = torch.cat(order) if order else torch.empty(0, dtype=torch.int32, device="cpu")
        sent = np.diff(first_hop, axis=0).tolist()
        return Chunks(tokens, flat, sent, relayed, first_hop, num_chunks)


def build_route(
    marks_TR: np.ndarray,
    tokens_R: Sequence[int],
    starts_RL: np.ndarray,
    marks_RTL: Mapping[int, np.ndarray],
    topology: Topology,
    rank: int,
    kernels: RowKernels,
) -> TwoLevelRoute:
    """The route of a dispatch as `rank` knows it, whose tokens go to the ranks that `marks` says.

    Of this rank and of its partners `starts` says where their rows begin in each local rank's
    result; `marks_RTL` says which local ranks get each token of the partners.
    """
    rails = topology.rails_of(rank)
    sources = {rail: topology.sources(rail) for rail in rails}
    path = TwoLevelRoute(
        topology=topology,
        own_rail=topology.place(rank),
        num_tokens={rail: max(tokens_R[one] for one in sources[rail]) for rail in rails},
        hops=list_hops(marks_TR, topology, rank, kernels),
        relays={rail: [] for rail in rails},
        starts=starts_RL[rank],
    )
    for rail, source in topology.upstream(rank):
        home, starts_L = topology.node_of_rank[source], starts_RL[source]
        path.relays[rail].append(list_relay(marks_RTL[source], home, starts_L, kernels))
    return path


@dataclass(eq=False)
class KnownMarks:
    """What a rank knows after a dispatch: which ranks get its tokens, and which ranks of its node
    get those of others. The route follows from that, and dispatches whose rows came with the
    agreement's words, and combines that answer so, never need it.
    """

    marks_TR: np.ndarray  # of this rank's tokens
    tally_FR: np.ndarray  # by source, as `wire.nodes_table` says
    bits: np.ndarray  # what the `pack_marks` of sources made for this node
    topology: Topology
    rank: int
    _path: TwoLevelRoute | None = None

    def path(self, kernels: RowKernels) -> TwoLevelRoute:
        if self._path is None:
            num_ranks, tokens_R = len(self.tally_FR) - FACTS, self.tally_FR[CAME_TOKENS].tolist()
            marks_RTL = {}
            for _, source in self.topology.upstream(self.rank):
                begin = int(self.tally_FR[CAME_BITS, source])
                end = begin + tokens_R[source] * -(-num_ranks // 8)
                marks_RTL[source] = unpack_marks(self.bits[begin:end], num_ranks)
            starts_RL = np.ascontiguousarray(self.tally_FR[FACTS:].T)
            self._path = build_route(
                self.marks_TR, tokens_R, starts_RL, marks_RTL, self.topology, self.rank, kernels
            )
        return self._path


def list_hops(marks_TR: np.ndarray, topology: Topology, rank: int, kernels: RowKernels) -> Hops:
    """Ranks 0 and 1 are on node 0, rank 2 is on node 1. This is rank 0; its token 0 goes
    to ranks 1 and 2, token 1 to rank 2:

    >>> from tokenyard.kernels import reference
    >>> marks = np.array([[0, 1, 1], [0, 0, 1]], bool)
    >>> route, *tables = list_hops(marks, Topology((0, 0, 1)), 0, reference)
    >>> route.send_token.tolist(), route.send_counts, tables
    ([0, 0, 1], (0, 1, 2), [[0, 0, 1], [-1, 2], [0, 1]])
    """
    own = topology.node_of_rank[rank]
    columns: list[np.ndarray] = []
    node_of_hop: list[int] = []
    hop_of_node = [-1] * topology.num_nodes
    own_hops: list[int] = []
    for node, ranks in enumerate(topology.ranks_of_node):
        here = marks_TR[:, list(ranks)]
        if node == own:
            own_hops = list(range(len(columns), len(columns) + len(ranks)))
            columns.extend(here.T)
            node_of_hop.extend([node] * len(ranks))
        else:
            hop_of_node[node] = len(columns)
            columns.append(np.logical_or.reduce(here, axis=1))
            node_of_hop.append(node)
    marks_TH = torch.from_numpy(np.ascontiguousarray(np.stack(columns, 1)))
    return Hops(kernels.route(marks_TH), node_of_hop, hop_of_node, own_hops)


def pack_marks(marks_TR: np.ndarray, ranks: Sequence[int]) -> np.ndarray:
    """Which of these ranks get each token, as bits, from the start of a byte for each token.

    >>> pack_marks(np.array([[True, False, True], [False, True, True]]), [0, 2]).tolist()
    [192, 64]
    """
    return np.packbits(marks_TR[:, list(ranks)], axis=1).ravel()


def unpack_marks(bits: np.ndarray, num_ranks: int) -> np.ndarray:
    """What `pack_marks` packed of so many ranks: [T, L] of 0 and 1.

    >>> unpack_marks(np.array([192, 64], np.uint8), 2).tolist()
    [[1, 1], [0, 1]]
    """
    return np.unpackbits(bits.reshape(-1, -(-num_ranks // 8)), axis=1)[:, :num_ranks]


def list_relay(marks_TL: np.ndarray, node: int, starts: np.ndarray, kernels: RowKernels) -> Relay:
    """The relay of a partner on another node, from who gets its tokens in this node.

    >>> from tokenyard.kernels import reference
    >>> marks = np.array([[1, 1], [0, 0], [0, 1]], np.uint8)
    >>> relay = list_relay(marks, 1, np.zeros(2, int), reference)
    >>> relay.before.tolist(), relay.route.send_token.tolist(), relay.route.send_counts
    ([0, 1, 1, 2], [0, 0, 1], (1, 2))
    """
    comes = marks_TL.any(1)
    before = np.concatenate([[0], comes.cumsum()])
    rows_NL = np.ascontiguousarray(marks_TL[comes])
    route = kernels.route(torch.from_numpy(rows_NL).view(torch.bool))
    return Relay(node, route, before, starts)
