"""Memory of every rank that all ranks read and write, with signals: where ranks share a node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokenyard.engine.agreement import Call, Terms
from tokenyard.engine.engine import Engine
from tokenyard.engine.mismatch import STAGES
from tokenyard.errors import CallMismatch
from tokenyard.shm.node import SharedNode
from tokenyard.transports.direct import DirectTransport
from tokenyard.transports.ring import RingTransport
from tokenyard.types import round_up
from tokenyard.wire.columns import LINE


def node_of(engine: Engine) -> SharedNode | None:
    """The memory that all ranks of the group share; None if some do not."""
    transport = engine.transport
    return transport.node if isinstance(transport, (DirectTransport, RingTransport)) else None


def meet(engine: Engine, stage: str, terms: dict[str, int]) -> None:
    """Wait until all ranks make this call, and all calls before it have ended. If ranks give other
    numbers, all raise CallMismatch.
    """
    engine.worker.drain()
    own = list(terms.values())
    engine.agreement.meet(stage, Terms(Call(stage=STAGES.index(stage))))
    told = np.array([own] * engine.num_ranks, np.int64)
    for rank, theirs in enumerate(engine.transport.exchange(told, stage).tolist()):
        for name, mine, other in zip(terms, own, theirs):
            if mine != other:
                raise CallMismatch(
                    f"{stage}: ranks differ in {name}: {mine} on rank {engine.rank}, {other} on "
                    f"rank {rank}",
                    what=name,
                )


class SharedBlock:
    """So many bytes of every rank, after lines for signals, until a block for the same stage is
    made, or the buffer is closed.

    A signal is a count that only grows. Rank r raises a line in the memory of another rank after it
    has written there, and waits for lines in its own.
    """

    def __init__(self, node: SharedNode, num_lines: int, num_bytes: int, stage: str) -> None:
        """All ranks together, when none uses an earlier block for this stage any more. If one has
        no memory, all raise SharedMemoryError.
        """
        node.release(stage)
        self.rank, self.size, self.num_bytes = node.rank, node.size, num_bytes
        self._node = node
        begin = LINE * num_lines
        mapped = node.share_arrays(begin + round_up(max(num_bytes, 1), LINE), stage, stage)
        self._addresses = [int(array.ctypes.data) for array in mapped]
        # A tensor keeps its array, so results stay readable when the buffer is closed.
        with torch.inference_mode(False):  # later calls may have another mode
            tensors = [torch.from_numpy(array) for array in mapped]
            self.memory = [one[begin : begin + num_bytes] for one in tensors]

    def signal(self, line: int, ranks: Sequence[int], count: int) -> None:
        """Raise this line in the memory of these ranks. All that this thread wrote comes before."""
        table = np.array([self._addresses[rank] + LINE * line for rank in ranks], np.int64)
        address = int(table.ctypes.data)
        self._node.signals.meet(address, address, len(ranks), count, 0)

    def wait(self, lines: Sequence[int], ranks: Sequence[int], count: int, stage: str) -> None:
        """Wait until these lines of this rank, each raised by one of these ranks, reach a count.
        Raises PeerDied, PeerLeft or PeerTimeout, which name the rank that did not come.
        """
        own, first = self._addresses[self.rank], 0
        table = np.array([own + LINE * line for line in lines], np.int64)

        def step() -> int:
            nonlocal first
            signals, address = self._node.signals, int(table.ctypes.data)
            first = signals.await_signals(address, len(lines), count, first, 20)
            return len(lines) - first

        self._node.liveness.wait_until(step, lambda: (ranks[first],), stage)


def as_bytes(t: Tensor) -> Tensor:
    """[n] uint8, the memory of a contiguous tensor."""
    return t.detach().reshape(-1).view(torch.uint8)
