"""Rows put into peers' memory by kernels of the device, and pulled from it to be summed.

Every rank has a block of memory that all others can write to and read (see `peers`). Dispatch: the
sender puts each row into its place in the receiver's block, raises a flag there, waits for the
flags of all others, and copies its rows out. Combine: each rank copies its rows into its own block,
and the ranks that sum them read them there. A block is written again only when all ranks have said
that they are done reading: two flags a pair of ranks, epochs that only grow.

For GPUs of one node that see each other's memory, with Triton's kernels. Blocks are as large as the
largest call needs; all ranks make larger ones together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard.comm.base import Communicator, Move
from tokenyard.errors import PeerError
from tokenyard.kernels.base import RowKernels
from tokenyard.runtime import memory
from tokenyard.runtime.memory import as_bytes
from tokenyard.runtime.pool import size_class
from tokenyard.transports.base import Sum
from tokenyard.transports.collective import exchange_words
from tokenyard.transports.symmetric_memory import PeerMemory, SymmetricBlock
from tokenyard.types import Config, Flow, Handle, Route
from tokenyard.wire.columns import LINE, column_offsets

_ROWS, _READ = range(2)  # flags: rows were written; they were read
_KINDS = 2


class PutKernels(RowKernels, Protocol):
    def put(self, x_TB: Tensor, route: Route, targets: Sequence[int], chunk: int) -> None: ...

    def raise_flags(self, flags: Sequence[int], epoch: int, device: torch.device) -> None: ...

    def await_flags(
        self, flags: Sequence[int], epoch: int, missing: Tensor, first: int, patience: int
    ) -> None: ...

    def reduce_at(
        self,
        addresses: Sequence[int],
        route: Route,
        node_of_rank: Sequence[int],
        biases_TD: Sequence[Tensor],
        out_TD: Tensor,
    ) -> None: ...

    def rearrange(self, dst: Tensor, src: Tensor) -> None: ...


class _Room:
    """A block in use: flags first, then columns."""

    def __init__(self, block: SymmetricBlock, rank: int, room: int) -> None:
        size = len(block.addresses)
        self.own = block.own[LINE * _KINDS * size :]
        self.room = room
        self.starts = [address + LINE * _KINDS * size for address in block.addresses]
        # Where this rank's flags are in all blocks, and those of all ranks in its own.
        self.outgoing = [
            [address + LINE * (kind * size + rank) for address in block.addresses]
            for kind in range(_KINDS)
        ]
        self.incoming = [
            [block.addresses[rank] + LINE * (kind * size + peer) for peer in range(size)]
            for kind in range(_KINDS)
        ]
        self.epoch = 0  # moves that were made in it

    def rows(self, begin: int, num_rows: int, width: int) -> Tensor:
        return self.own[begin : begin + num_rows * width].view(num_rows, width)


class SymmetricTransport:
    name = "symmetric"
    moves_alone = False
    offers_memory = True

    def __init__(
        self,
        communicator: Communicator,
        peers: PeerMemory,
        kernels: PutKernels,
        node_of_rank: Sequence[int],
    ) -> None:
        self._communicator = communicator
        self._peers = peers
        self._kernels = kernels
        self._node_of_rank = node_of_rank
        self._room: _Room | None = None
        self.rank, self.size = communicator.rank, communicator.size

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        self._peers.check(stage)
        return exchange_words(self._communicator, message_RM, stage)

    def offer_rows(self, flow: Flow | None, widths: Sequence[int]) -> Sequence[int]:
        return ()

    def learn_route(
        self, flow: Flow, is_token_in_rank_TR: Tensor, widths: Sequence[int], stage: str
    ) -> None: ...

    def send(
        self,
        columns: Sequence[Tensor],
        flow: Flow,
        told_RW: np.ndarray,
        config: Config,
        stage: str,
    ) -> tuple[list[Tensor], Move]:
        arrive = [self.empty(flow.num_rows, column.shape[1], column.dtype) for column in columns]
        outs = [as_bytes(out) for out in arrive]
        room, offsets, targets = self._places(outs, flow, stage)
        chunk = config.num_max_nvl_chunked_send_tokens

        def move() -> None:
            self._begin(room, stage)
            for column, places in zip(columns, targets):
                self._kernels.put(as_bytes(column), flow.route, places, chunk)
            self._meet(room, stage)
            for out, begin in zip(outs, offsets):
                arrived = room.rows(begin, flow.num_received, out.shape[1])
                self._kernels.rearrange(out[: flow.num_received], arrived)
            self._end(room)

        return arrive, move

    def offer_back(self, columns: Sequence[Tensor], flow: Flow, ready: bool) -> np.ndarray:
        return np.empty((self.size, 0), np.int64)

    def sum_back(
        self,
        sums: Sequence[Sum],
        handle: Handle,
        told_RW: np.ndarray,
        config: Config,
        stage: str,
    ) -> Move:
        flow = handle.flow
        columns = [as_bytes(one.rows_ND) for one in sums]
        room, offsets, sources = self._places(columns, flow, stage)

        def move() -> None:
            self._begin(room, stage)
            for column, begin in zip(columns, offsets):
                mine = room.rows(begin, flow.num_received, column.shape[1])
                self._kernels.rearrange(mine, column[: flow.num_received])
            self._meet(room, stage)
            for one, places in zip(sums, sources):
                self._kernels.reduce_at(
                    places, flow.route, self._node_of_rank, one.biases_TD, one.out_TD
                )
            self._end(room)

        return move

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return memory.empty(num_rows, width, dtype=dtype, device=self._peers.device)

    def tell(self, error: PeerError) -> None:
        self._peers.tell(error)

    def dead_ranks(self) -> tuple[int, ...]:
        return self._peers.dead_ranks()

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        return self._communicator.explain(stage, error)

    def close(self) -> None:
        self._peers.close()
        self._communicator.close()

    def _places(
        self, columns: Sequence[Tensor], flow: Flow, stage: str
    ) -> tuple[_Room, list[int], list[list[int]]]:
        """Where columns [N, B] begin in this rank's block; and where, for each column, the rows
        that this rank exchanges with each rank begin in that rank's block.
        """
        rows_R, starts_R = self._counts(flow, stage)
        widths = [column.shape[1] for column in columns]
        offsets = [column_offsets(num_rows, tuple(widths)) for num_rows in rows_R]
        needed = max(ends[-1] for ends in offsets)
        if self._room is None or self._room.room < needed:
            room = size_class(needed)
            block = self._peers.make(LINE * _KINDS * self.size + room, stage)
            self._room = _Room(block, self.rank, room)
        places = [
            [
                start + ends[j] + first * width
                for start, ends, first in zip(self._room.starts, offsets, starts_R)
            ]
            for j, width in enumerate(widths)
        ]
        return self._room, offsets[self.rank], places

    def _counts(self, flow: Flow, stage: str) -> tuple[list[int], list[int]]:
        """The rows that arrive at each rank, and at which of them this rank's begin."""
        if flow.sent_RR is not None:
            return flow.sent_RR.sum(0).tolist(), flow.sent_RR[: self.rank].sum(0).tolist()
        before = np.cumsum([0, *flow.recv_counts])
        message = np.stack([np.full(self.size, before[-1]), before[:-1]], 1).astype(np.int64)
        told_RW = self.exchange(message, stage)
        return told_RW[:, 0].tolist(), told_RW[:, 1].tolist()

    def _begin(self, room: _Room, stage: str) -> None:
        """All ranks have read what the last move left in their blocks, or in this rank's."""
        self._await(room, _READ, stage)
        room.epoch += 1

    def _meet(self, room: _Room, stage: str) -> None:
        self._kernels.raise_flags(room.outgoing[_ROWS], room.epoch, self._peers.device)
        self._await(room, _ROWS, stage)

    def _end(self, room: _Room) -> None:
        self._kernels.raise_flags(room.outgoing[_READ], room.epoch, self._peers.device)

    def _await(self, room: _Room, kind: int, stage: str) -> None:
        def look(missing: Tensor, first: int, patience: int) -> None:
            flags = room.incoming[kind]
            self._kernels.await_flags(flags, room.epoch, missing, first, patience)

        self._peers.wait(look, self.size, stage)
