"""Ranks that share memory pass rows through rings: DeepEP's design, in a fixed amount of memory.

Each rank owns a ring per (channel, source). Senders write records into it, and the owner takes them
out: to their final place in dispatch, into the sum in combine. So a row is copied twice, and the
memory that ranks share stays `num_nvl_bytes` a rank however much is moved. Choose it where that
matters, as with many ranks or long batches; `direct` is faster. `kernels/numba/ring/protocol.py`
has the protocol.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from tokenyard.comm.base import Move
from tokenyard.errors import OnAllRanks
from tokenyard.kernels.base import RowKernels, Tensors
from tokenyard.runtime.threads import in_threads
from tokenyard.shm.mailbox import SignalKernels
from tokenyard.shm.node import SharedNode
from tokenyard.transports.base import RowsBack, RowsOut, SharedMemoryTransport, Transport
from tokenyard.types import Config, Flow, round_up
from tokenyard.wire.columns import LINE, row_widths
from tokenyard.wire.rings import RingUse
from tokenyard.wire.signals import ROWS

DEFAULT_BYTES = 16 << 20  # of a rank
_PAGE = mmap.PAGESIZE
_PATIENCE = 200  # rounds of a kernel in which nothing moves


class RingKernels(RowKernels, SignalKernels, Protocol):
    def make_rings(
        self,
        rank: int,
        bases_R: np.ndarray,
        node_of_rank: Sequence[int],
        ring_bytes: int,
        num_channels: int,
    ) -> Any: ...

    def ring_slots(self, ring_bytes: int, widths: Sequence[int]) -> int: ...

    def ring_bytes(self, slots: int, widths: Sequence[int]) -> int: ...

    def plan_ring_dispatch(
        self, rings: Any, columns: Tensors, outs: Tensors, flow: Flow, use: RingUse
    ) -> Any: ...

    def ring_dispatch(self, plan: Any, begin: int, end: int, patience: int) -> int: ...

    plan_ring_combine: Callable[..., Any]  # of `kernels.numba.ring.combine`

    def ring_combine(self, plan: Any, begin: int, end: int, patience: int) -> int: ...


class RingTransport(SharedMemoryTransport):
    name = "ring"
    empty = Transport.empty  # results are not read by other ranks: rows pass through the rings

    def __init__(
        self,
        node: SharedNode,
        kernels: RingKernels,
        node_of_rank: Sequence[int],
        num_bytes: int,
        num_channels: int,
    ) -> None:
        """All ranks together. Raises SharedMemoryError on all if one of them has no memory."""
        self.node = self._node = node
        self._kernels = kernels
        self.rank, self.size = node.rank, node.size
        self._num_bytes, self._num_channels = num_bytes or DEFAULT_BYTES, num_channels
        room = max(self._num_bytes - node.control_bytes, 0) // _PAGE * _PAGE
        self._ring_bytes = room // (num_channels * node.size) // LINE * LINE
        bases_R = node.share(max(room, _PAGE), "Buffer (attach)", "rings")
        self._rings = kernels.make_rings(
            self.rank, bases_R, node_of_rank, self._ring_bytes, num_channels
        )

    def send(self, rows: RowsOut) -> tuple[list[Tensor], Move]:
        columns, flow, _, _, config, stage = rows
        use = self._use(columns, config, stage)
        arrive = [self.empty(flow.num_rows, column.shape[1], column.dtype) for column in columns]

        def move() -> None:
            plan = self._kernels.plan_ring_dispatch(self._rings, columns, arrive, flow, use)
            kernel = partial(self._kernels.ring_dispatch, plan)
            moved = _moved_bytes(flow, columns)
            self._drive(kernel, plan.awaited, use.num_channels, moved, stage)

        return arrive, move

    def sum_back(self, back: RowsBack) -> Move:
        sums, handle, _, _, config, stage = back
        flow, columns = handle.flow, [one.rows_ND for one in sums]
        use, outs = self._use(columns, config, stage), [one.out_TD for one in sums]
        source, biases = handle.ledger.src_idx, sums[0].biases_TD

        def move() -> None:
            plan = self._kernels.plan_ring_combine(
                self._rings, columns, outs, flow, source, biases, use
            )
            kernel = partial(self._kernels.ring_combine, plan)
            moved = _moved_bytes(flow, columns)
            self._drive(kernel, plan.awaited, use.num_channels, moved, stage)

        return move

    def _use(self, columns: Sequence[Tensor], config: Config, stage: str) -> RingUse:
        """How a call uses the rings: all ranks come to the same, and raise together. Rings are made
        for all channels when the Buffer is opened.
        """
        widths = row_widths(columns)
        slots = self._kernels.ring_slots(self._ring_bytes, widths)
        if slots < 1:
            rings = self._num_channels * self.size * self._kernels.ring_bytes(1, widths)
            needed = self._node.control_bytes + round_up(rings, _PAGE)
            hint = config.get_nvl_buffer_size_hint(widths[0], self.size)
            raise OnAllRanks(
                f"{stage}: num_nvl_bytes is {self._num_bytes}, want at least {needed} for a row in "
                f"each ring; get_nvl_buffer_size_hint says {hint}, on rank {self.rank}"
            )
        return RingUse(
            slots=min(slots, config.num_max_nvl_chunked_recv_tokens),
            chunk=config.num_max_nvl_chunked_send_tokens,
            num_channels=min(config.num_channels, self._num_channels),
        )

    def _drive(
        self,
        kernel: Callable[[int, int, int], int],
        awaits: Callable[[], list[int]],
        num_channels: int,
        num_bytes: int,
        stage: str,
    ) -> None:
        """Send and receive on all channels, with as many threads as torch may use, if they pay."""
        has_raised: list[bool] = []

        def part(begin: int, end: int) -> None:
            def step() -> int:
                if has_raised:  # a part ends with the whole call, which that error has ended
                    return 0
                left = kernel(begin, end, _PATIENCE)
                if left < 0:
                    raise self._node.liveness.stray(-1 - left, stage)
                return left

            try:
                self._node.liveness.wait_until(step, awaits, stage)
            except BaseException:
                has_raised.append(True)
                raise

        in_threads(part, num_channels, num_bytes)
        # Rings do not need this signal, but the survivors of a death do: a rank that went on alone
        # would wait elsewhere for ranks that heard of the death here.
        self._node.mailbox.meet(ROWS, stage)


def _moved_bytes(flow: Flow, columns: Sequence[Tensor]) -> int:
    """Bytes of the rows that a rank sends and receives."""
    return (flow.num_received + sum(flow.route.send_counts)) * sum(row_widths(columns))
