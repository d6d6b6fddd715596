"""How a tensor gets from a rank to its neighbour: through slots in memory, or over a connection."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard.comm.base import Communicator, Exchange
from tokenyard.compat.elastic.shared_block import SharedBlock, as_bytes
from tokenyard.engine.engine import Engine
from tokenyard.runtime.events import EventHandle, Worker
from tokenyard.shm.node import SharedNode
from tokenyard.types import round_up
from tokenyard.wire.columns import LINE

SEND, RECEIVE = "pp_send", "pp_recv"


class SharedPipe:
    """Slots in every rank's memory for the tensors of its two neighbours, used in turn.

    The lines of a rank, by side (0: the rank before it, 1: the one after it): how many tensors came
    from there, and how many that were sent there have been taken. A slot begins with the bytes of
    the tensor in it.
    """

    def __init__(self, node: SharedNode, num_bytes: int, num_slots: int) -> None:
        self._rank, self._size, self._num_slots = node.rank, node.size, num_slots
        self._slot = LINE + round_up(num_bytes, LINE)
        self._block = SharedBlock(node, 4, 2 * num_slots * self._slot, "pp_set_config")
        self._sent, self._taken = [0, 0], [0, 0]  # by side

    def send(self, t: Tensor, to: int) -> None:
        here, there = self._side(self._rank, to), self._side(to, self._rank)
        number = self._sent[here]
        self._block.wait([2 + here], [to], number + 1 - self._num_slots, SEND)
        head, room = self._at(to, there, number)
        head[0] = t.numel()
        room[: t.numel()] = t
        self._sent[here] = number + 1
        self._block.signal(there, [to], number + 1)

    def receive(self, t: Tensor, source: int) -> int:
        """Returns how many bytes the sender had: those of t, or nothing was written."""
        here, there = self._side(self._rank, source), self._side(source, self._rank)
        number = self._taken[here]
        self._block.wait([here], [source], number + 1, RECEIVE)
        head, room = self._at(self._rank, here, number)
        num_bytes = int(head[0])
        if num_bytes == t.numel():
            t.copy_(room[:num_bytes])
        self._taken[here] = number + 1
        self._block.signal(2 + there, [source], number + 1)
        return num_bytes

    def close(self) -> None:
        """Nothing to do: what was sent lies in the receiver's memory."""

    def _side(self, rank: int, neighbour: int) -> int:
        return int(neighbour != (rank - 1) % self._size)

    def _at(self, rank: int, side: int, number: int) -> tuple[Tensor, Tensor]:
        begin = (side * self._num_slots + number % self._num_slots) * self._slot
        slot = self._block.memory[rank][begin : begin + self._slot]
        return slot[:8].view(torch.int64), slot[LINE:]


class Connections:
    """Connections for each direction between neighbours. A thread sends, so that a sender may be
    num_slots tensors ahead.
    """

    def __init__(self, engine: Engine, num_slots: int, name: str) -> None:
        """All ranks together, in the same order."""
        self._num_slots, communicator = num_slots, engine.communicator
        rank, size = communicator.rank, communicator.size
        self._out: dict[int, tuple[Communicator, Worker, list[EventHandle]]] = {}
        self._in: dict[int, Communicator] = {}
        for first in range(size if size > 2 else 1):
            pair = sorted((first, (first + 1) % size))
            if rank not in pair:
                continue
            for source in pair:
                link = communicator.part(pair, f"{name}/pp-{first}-from-{source}")
                other = sum(pair) - rank
                if source == rank:
                    worker = Worker(f"tokenyard-pp-{rank}-{other}", engine.failure.give_up)
                    self._out[other] = link, worker, []
                else:
                    self._in[other] = link

    def resize(self, num_slots: int) -> None:
        """All ranks together. Waits until what was sent has been received, or has failed."""
        for _, worker, _ in self._out.values():
            worker.wait()
        self._num_slots = num_slots

    def send(self, t: Tensor, to: int) -> None:
        link, worker, pending = self._out[to]
        while len(pending) >= self._num_slots:
            pending.pop(0).current_stream_wait()
        rows = t[:, None].to(link.device, copy=True)  # the user may change his own
        size = as_bytes(torch.tensor([len(rows)], device="cpu"))[:, None].to(link.device)

        def move() -> None:
            for one in (size, rows):
                counts = [0 if rank == link.rank else len(one) for rank in range(2)]
                link.all_to_all(Exchange(one[:0], one, [0, 0], counts, SEND))

        pending.append(worker.submit(move))

    def receive(self, t: Tensor, source: int) -> int:
        link = self._in[source]

        def take(num_bytes: int) -> Tensor:
            out = torch.empty(num_bytes, 1, dtype=torch.uint8, device=link.device)
            counts = [0 if rank == link.rank else num_bytes for rank in range(2)]
            link.all_to_all(Exchange(out, out[:0], counts, [0, 0], RECEIVE))
            return out[:, 0]

        num_bytes = int(take(8).cpu().view(torch.int64))
        got = take(num_bytes)
        if num_bytes == t.numel():
            t.copy_(got)
        return num_bytes

    def close(self) -> None:
        """Wait until what was sent has been received, or has failed."""
        for link, worker, _ in self._out.values():
            worker.close()
            link.close()
        for link in self._in.values():
            link.close()
