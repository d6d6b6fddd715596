"""Ranks on several nodes: each row crosses the network once per node, then goes on in memory.

Two exchanges, one after the other. Between nodes ranks send to their partners on a rail (`rails`);
inside a node they write into each other's memory, as `direct` does (`team`). On the way back the
rank that passed a token on sums what its node has for it, rounds that to the rows' dtype, and sends
one row. Chunks follow each other, so that the network has work while rows move in memory.

The default where ranks are on several nodes and those of each node share memory. It takes memory
for every result in full, and for a few chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard.comm.base import Communicator, Move
from tokenyard.errors import PeerError, name_ranks
from tokenyard.shm import shared_rows
from tokenyard.shm.node import READ, ROWS, Team
from tokenyard.shm.shared_rows import NO_MEMORY, SharedRows
from tokenyard.topology import Topology
from tokenyard.transports.base import Sum
from tokenyard.transports.direct import DirectKernels
from tokenyard.transports.hierarchical.links import Links
from tokenyard.transports.hierarchical.route import TwoLevelRoute, list_hops, pack_marks, read_relay
from tokenyard.transports.hierarchical.stream import CombineStream, DispatchStream
from tokenyard.types import Config, Flow, Handle
from tokenyard.wire.columns import column_offsets, row_widths

# int64s that ranks of a node pass on at once: for each partner the agreement's, if they fit.
_MESSAGE, _MOST_AT_ONCE = 128, 4096
# Seconds that ranks of a node wait longer for each other than for other nodes: who waits there must
# have the time to find out who is at fault, and to say so.
_LATER = 1.0


class HierarchicalTransport:
    name = "hierarchical"
    moves_alone = False
    offers_memory = True

    def __init__(
        self,
        communicator: Communicator,
        kernels: DirectKernels,
        topology: Topology,
        timeout: float,
        name: str,
    ) -> None:
        """All ranks together. `name` is new for every Buffer of the group. Raises OSError on all
        ranks if those of a node cannot attach each other's memory.
        """
        self.rank, self.size = communicator.rank, communicator.size
        self._kernels, self._topology = kernels, topology
        self._node = topology.node_of_rank[self.rank]
        self._locals = topology.ranks_of_node[self._node]
        self._upstream = [topology.upstream(rank) for rank in self._locals]
        self._mine = topology.upstream(self.rank)
        self._most = 1 + max(map(len, self._upstream))
        self._blocks: list[SharedRows] = []
        self._told: list[list[int]] | None = None  # of a dispatch that was surveyed
        self._opened = ExitStack()
        with ExitStack() as opened:
            neighbours = communicator.part(self._locals, f"{name}/node-{self._node}")
            opened.callback(neighbours.close)
            failure = None
            try:
                box = min(_MESSAGE * self._most, _MOST_AT_ONCE)
                self._team = Team(neighbours, kernels, timeout + _LATER, box)
                opened.callback(self._team.close)
            except OSError as error:
                failure = error
            failed = communicator.gather([int(failure is not None)], "Buffer (attach)")[0]
            if any(failed):
                culprits = name_ranks([rank for rank, one in enumerate(failed) if one])
                raise failure or OSError(f"{culprits} cannot attach memory of their node")
            self._links = Links(communicator, topology, name, self._team.raise_told)
            opened.callback(self._links.close)
            self._opened = opened.pop_all()

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        """To the partner in each node, what is for all ranks of it; these pass it on."""
        width = message_RM.shape[1]
        nodes = self._topology.ranks_of_node
        parcels = [
            np.ascontiguousarray(message_RM[list(ranks) if node != self._node else []])
            for node, ranks in enumerate(nodes)
        ]
        row_bytes = 8 * width * len(self._locals)
        with self._telling():
            came = self._swap(parcels, dict.fromkeys(range(self.size), row_bytes), stage)
        relayed_LPM = np.zeros((len(self._locals), self._most, width), np.int64)
        relayed_LPM[:, 0] = message_RM[list(self._locals)]
        for place, part in enumerate(came, start=1):
            relayed_LPM[:, place] = part.view(np.int64).reshape(len(self._locals), width)
        heard = self._team.exchange(relayed_LPM.reshape(len(self._locals), -1), stage)
        heard = heard.reshape(relayed_LPM.shape)
        answer_RM = np.empty_like(message_RM)
        for local, upstream in enumerate(self._upstream):
            answer_RM[self._locals[local]] = heard[local, 0]
            for place, (_, source) in enumerate(upstream, start=1):
                answer_RM[source] = heard[local, place]
        return answer_RM

    def offer_rows(self, flow: Flow | None, widths: Sequence[int]) -> Sequence[int]:
        self._told = None
        if flow is None:
            return ()  # memory is found once counts are known, in `learn_route`
        block = shared_rows.take(self._team.pool, column_offsets(flow.num_rows, tuple(widths))[-1])
        self._blocks = [block]
        return block.told

    def learn_route(
        self, flow: Flow, is_token_in_rank_TR: Tensor, widths: Sequence[int], stage: str
    ) -> TwoLevelRoute:
        block = shared_rows.take(self._team.pool, column_offsets(flow.num_rows, tuple(widths))[-1])
        self._blocks = [block]
        told = self._tell_neighbours(block, flow, stage)
        self._told = told[:, :3].tolist()
        without = [rank for rank, (fd, *_) in zip(self._locals, self._told) if fd == NO_MEMORY]
        tokens, marks_TR = flow.tokens_R.tolist(), is_token_in_rank_TR.numpy()
        said = self._tell_partners(marks_TR, tokens, 1 + without[0] if without else 0, stage)
        self._check_all([1 + rank for rank in without] + [one for one, _ in said], block, stage)
        path = TwoLevelRoute(
            topology=self._topology,
            own_rail=self._links.own,
            num_tokens={rail: self._most_tokens(rail, tokens) for rail in self._links.numbers},
            hops=list_hops(marks_TR, self._topology, self.rank, self._kernels),
            relays={rail: [] for rail in self._links.numbers},
            starts=told[:, 4].copy(),
            num_rows=told[:, 3].copy(),
        )
        for place, ((rail, source), (_, bits)) in enumerate(zip(self._mine, said)):
            starts_L, home = told[:, 5 + place].copy(), self._topology.node_of_rank[source]
            relay = read_relay(bits, home, tokens[source], starts_L, self._kernels)
            path.relays[rail].append(relay)
        return path

    def send(
        self,
        columns: Sequence[Tensor],
        flow: Flow,
        told_RW: np.ndarray,
        config: Config,
        stage: str,
    ) -> tuple[list[Tensor], Move]:
        (block,), self._blocks = self._blocks, []
        told, self._told = self._told, None
        if told is None:
            shared_rows.check(told_RW[:, :1], [block.error], stage, self.rank)
            told = told_RW[list(self._locals), :3].tolist()
        mapped = [
            self._team.memory(local, one, stage) if local != self._team.rank else None
            for local, one in enumerate(told)
        ]
        blocks_L = np.array([one.address if one else block.address for one in mapped], np.int64)

        def move(held: Any = (block, mapped)) -> None:
            # `held` lives until all ranks have written, even if nobody wants the result any more.
            stream = DispatchStream(
                flow.two_level, columns, blocks_L, self._kernels, self._team.beat
            )
            with self._telling():
                self._links.stream(stream, stage)
            self._team.meet(ROWS, stage)

        offsets = column_offsets(flow.num_rows, row_widths(columns))
        return shared_rows.views(block, offsets, flow.num_rows, columns), move

    def offer_back(self, columns: Sequence[Tensor], flow: Flow, ready: bool) -> np.ndarray:
        words: list[int] = []
        self._blocks = []
        for column in columns:
            block, begin = shared_rows.find_or_take(self._team.pool, column, flow.num_received)
            ready = ready and block.error is None and block.array is None
            self._blocks.append(block)
            words += [*block.told, begin]
        return np.array([[int(ready), *words]] * self.size, np.int64)

    def sum_back(
        self,
        sums: Sequence[Sum],
        handle: Handle,
        told_RW: np.ndarray,
        config: Config,
        stage: str,
    ) -> Move:
        flow, mine = handle.flow, self._blocks
        self._blocks = []
        told_fds = told_RW[:, 1 : 1 + 4 * len(mine) : 4]
        shared_rows.check(told_fds, [block.error for block in mine], stage, self.rank)
        told_LW = told_RW[list(self._locals)]
        bases, held = [], []
        for place, one in enumerate(sums):
            addresses = [one.rows_ND.data_ptr()] * len(self._locals)
            for local, (*told, begin) in enumerate(
                told_LW[:, 1 + 4 * place : 5 + 4 * place].tolist()
            ):
                if local != self._team.rank:
                    mapped = self._team.memory_at(local, told, begin, 0, stage)
                    held.append(mapped)
                    addresses[local] = mapped.address
            bases.append(np.array(addresses, np.int64))
        all_ready = all(told_LW[:, 0].tolist())

        def move(held: Any = held) -> None:
            for one, block in zip(sums, mine):
                shared_rows.share(one.rows_ND, block, flow, self.rank, self._kernels)
            if not all_ready:
                self._team.meet(ROWS, stage)
            for one, bases_L in zip(sums, bases):
                stream = CombineStream(flow.two_level, one, bases_L, self._kernels, self._team.beat)
                with self._telling():
                    self._links.stream(stream, stage)
            # The rows are the user's again after this, so all must have read them.
            self._team.meet(READ, stage)

        return move

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self._team.pool.rows(num_rows, width, dtype)

    def tell(self, error: PeerError) -> None:
        self._team.tell(error)

    def dead_ranks(self) -> tuple[int, ...]:
        return self._team.dead_ranks()

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        return self._team.explain(stage, error)

    def close(self) -> None:
        self._opened.close()

    def _tell_neighbours(self, block: SharedRows, flow: Flow, stage: str) -> np.ndarray:
        """To each rank of the node: this rank's block, how many rows it holds, and where the rows
        of that rank, and of each of its partners, begin in it. Their answers, by place.
        """
        firsts = list(accumulate(flow.recv_counts, initial=0))
        message = np.zeros((len(self._locals), 4 + self._most), np.int64)
        message[:, :4] = *block.told, flow.num_rows
        for place, upstream in enumerate(self._upstream):
            sources = [self._locals[place], *(source for _, source in upstream)]
            message[place, 4 : 4 + len(sources)] = [firsts[source] for source in sources]
        return self._team.exchange(message, stage)

    def _tell_partners(
        self, marks_TR: np.ndarray, tokens_R: Sequence[int], failed: int, stage: str
    ) -> list[tuple[int, np.ndarray]]:
        """To each other node: who there gets each token, after a number that says whether this node
        can go on. What the partners said, in their order.
        """
        head = np.array([failed], np.int32).view(np.uint8)
        parcels = [
            np.concatenate([head, pack_marks(marks_TR, ranks)]) if node != self._node else head[:0]
            for node, ranks in enumerate(self._topology.ranks_of_node)
        ]
        each = -(-len(self._locals) // 8)  # bytes of a token's marks
        sizes = {rank: len(head) + each * num for rank, num in enumerate(tokens_R)}
        with self._telling():
            came = self._swap(parcels, sizes, stage)
        return [(int(one[: len(head)].view(np.int32)[0]), one[len(head) :]) for one in came]

    def _swap(
        self, parcels: Sequence[np.ndarray], sizes_R: dict[int, int], stage: str
    ) -> list[np.ndarray]:
        """Bytes for each other node, and what came from each partner, in their order; `sizes_R`
        says how many bytes a rank sends to this one's node.
        """
        nodes = range(self._topology.num_nodes)
        sizes = {rail: [0] * len(nodes) for rail in self._links.numbers}
        homes = [self._topology.node_of_rank[source] for _, source in self._mine]
        for (rail, source), home in zip(self._mine, homes):
            sizes[rail][home] = sizes_R[source]
        flat = [parcel.reshape(-1).view(np.uint8) for parcel in parcels]
        answer = self._links.exchange(flat, sizes, stage)
        return [answer[rail][home] for (rail, _), home in zip(self._mine, homes)]

    def _most_tokens(self, rail: int, tokens_R: Sequence[int]) -> int:
        sources = [self._topology.source(rail, node) for node in range(self._topology.num_nodes)]
        return max(tokens_R[source] for source in sources if source is not None)

    def _check_all(self, failed: Sequence[int], block: SharedRows, stage: str) -> None:
        """If a rank of any node has no memory for its rows, all ranks of all nodes raise: numbers
        above 0 are such ranks, plus 1.
        """
        worst = max(failed, default=0)
        told = self._team.exchange(np.full((len(self._locals), 1), worst, np.int64), stage)
        if told.any():
            raise shared_rows.no_memory([int(told.max()) - 1], block.error, stage, self.rank)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Ranks of the node that wait for this one are told why it does not come."""
        try:
            yield
        except PeerError as error:
            self._team.tell(error)
            raise
