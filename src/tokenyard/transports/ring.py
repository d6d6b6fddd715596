"""Ranks that share memory pass rows through rings: DeepEP's design, in a fixed amount of memory.

Each rank owns a ring per (channel, source); senders write records and the owner takes them out, to
their final place in dispatch and into the sum in combine. So a row is copied twice, and whatever is
moved, the memory that ranks share for it stays `num_nvl_bytes` a rank. Choose it where that
matters, as with many ranks or long batches; `direct` is faster. The kernels' file has the protocol.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard.comm.base import Move
from tokenyard.errors import OnAllRanks, PeerError
from tokenyard.kernels.base import RowKernels, Tensors
from tokenyard.runtime import memory
from tokenyard.runtime.threads import in_channels
from tokenyard.shm.node import ROWS, SignalKernels, Team
from tokenyard.transports.base import Sum
from tokenyard.types import Config, Flow, Handle, round_up
from tokenyard.wire.columns import LINE
from tokenyard.wire.rings import RingUse

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

    def plan_ring_combine(
        self,
        rings: Any,
        columns: Tensors,
        outs: Tensors,
        flow: Flow,
        recv_src_idx_N: Tensor,
        biases_TD: Tensors,
        use: RingUse,
    ) -> Any: ...

    def ring_combine(self, plan: Any, begin: int, end: int, patience: int) -> int: ...


class RingTransport:
    name = "ring"
    moves_alone = False
    offers_memory = False

    def __init__(
        self,
        team: Team,
        kernels: RingKernels,
        node_of_rank: Sequence[int],
        num_bytes: int,
        num_channels: int,
    ) -> None:
        """All ranks together. Raises SharedMemoryError on all if one of them has no memory."""
        self._team = team
        self._kernels = kernels
        self.rank, self.size = team.rank, team.size
        self._num_bytes, self._num_channels = num_bytes or DEFAULT_BYTES, num_channels
        room = max(self._num_bytes - team.control_bytes, 0) // _PAGE * _PAGE
        self._ring_bytes = room // (num_channels * team.size) // LINE * LINE
        bases_R = team.share(max(room, _PAGE), "Buffer (attach)")
        self._rings = kernels.make_rings(
            self.rank, bases_R, node_of_rank, self._ring_bytes, num_channels
        )

    @property
    def team(self) -> Team:
        return self._team

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        return self._team.exchange(message_RM, stage)

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
        use = self._use(columns, config, stage)
        arrive = [self.empty(flow.num_rows, column.shape[1], column.dtype) for column in columns]

        def move() -> None:
            plan = self._kernels.plan_ring_dispatch(self._rings, columns, arrive, flow, use)
            moved = (flow.num_received + sum(flow.route.send_counts)) * _width(columns)
            self._drive(
                lambda begin, end: self._kernels.ring_dispatch(plan, begin, end, _PATIENCE),
                plan.awaited,
                use.num_channels,
                moved,
                stage,
            )

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
        flow, columns = handle.flow, [one.rows_ND for one in sums]
        use, outs = self._use(columns, config, stage), [one.out_TD for one in sums]
        source, biases = handle.recv_src_idx, sums[0].biases_TD

        def move() -> None:
            plan = self._kernels.plan_ring_combine(
                self._rings, columns, outs, flow, source, biases, use
            )
            moved = (flow.num_received + sum(flow.route.send_counts)) * _width(columns)
            self._drive(
                lambda begin, end: self._kernels.ring_combine(plan, begin, end, _PATIENCE),
                plan.awaited,
                use.num_channels,
                moved,
                stage,
            )

        return move

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return memory.empty(num_rows, width, dtype=dtype)

    def tell(self, error: PeerError) -> None:
        self._team.tell(error)

    def dead_ranks(self) -> tuple[int, ...]:
        return self._team.dead_ranks()

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        return self._team.explain(stage, error)

    def close(self) -> None:
        self._team.close()

    def _use(self, columns: Sequence[Tensor], config: Config, stage: str) -> RingUse:
        """How a call uses the rings: all ranks come to the same, and raise together.

        Each channel has rings of its own for the life of the Buffer.
        """
        widths = [column.shape[1] * column.element_size() for column in columns]
        slots = self._kernels.ring_slots(self._ring_bytes, widths)
        if slots < 1:
            rings = self._num_channels * self.size * self._kernels.ring_bytes(1, widths)
            needed = self._team.control_bytes + round_up(rings, _PAGE)
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
        kernel: Callable[[int, int], int],
        awaits: Callable[[], list[int]],
        num_channels: int,
        num_bytes: int,
        stage: str,
    ) -> None:
        """Both sides of the channels, by as many threads as torch was told to take, if it pays."""

        def part(begin: int, end: int) -> None:
            def step() -> int:
                left = kernel(begin, end)
                if left < 0:
                    raise self._team.stray(-1 - left, stage)
                return left

            self._team.wait_until(step, awaits, stage)

        in_channels(part, num_channels, num_bytes)
        # Rings do not need this, but survivors of a death do: a rank that went on alone would wait
        # elsewhere for those that were told of it here.
        self._team.meet(ROWS, stage)


def _width(columns: Sequence[Tensor]) -> int:
    return sum(column.shape[1] * column.element_size() for column in columns)
