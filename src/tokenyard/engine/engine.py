"""Engine: what a Buffer stands on. It joins kernels and transports, and finds how calls are made.

calls      where all ranks share memory: compiled calls, whatever their size
nodes      between nodes: compiled calls of few rows, else those of `general`
general    on any transport, step by step
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol, cast

from torch import Tensor

from tokenyard.engine.by_expert import RowsByExpert
from tokenyard.engine.calls import SharedCalls
from tokenyard.engine.core import Core
from tokenyard.engine.general import GeneralCalls
from tokenyard.engine.inputs import AgainRequest, CombineRequest, DispatchRequest, wait
from tokenyard.engine.nodes import NodeCalls
from tokenyard.errors import PeerLeft, lack_of_memory
from tokenyard.replicas import Replicas
from tokenyard.results import Handle
from tokenyard.runtime.completion import Completion
from tokenyard.runtime.events import EventOverlap
from tokenyard.topology import Placement
from tokenyard.transports.direct import DirectTransport
from tokenyard.transports.hierarchical import HierarchicalTransport
from tokenyard.types import Layout, Received


class Calls(Protocol):
    """The calls that exchange rows. All ranks make them together."""

    def dispatch(
        self, request: DispatchRequest, completion: Completion, stage: str
    ) -> tuple[Received, Handle, EventOverlap]:
        """Each token's row to every rank that owns one of its experts."""

    def dispatch_again(
        self, request: AgainRequest, completion: Completion
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Rows along a handle: (x, scales), without counting."""

    def combine(
        self, request: CombineRequest, completion: Completion, stage: str
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """The sums of each token's rows, in `out` if it is given, and of its weights."""

    def dispatch_by_expert(self, request: DispatchRequest) -> tuple[RowsByExpert, Handle]:
        """Each token's row to every expert."""

    def combine_by_expert(self, request: CombineRequest, weigh: Any) -> Tensor:
        """The sums of each token's rows by expert."""

    def forget(self) -> None:
        """The placement has changed."""

    def wait_to_leave(self) -> None:
        """Wait before memory is unmade that other ranks may still read."""


class Engine(Core):
    def __init__(self, *parts: Any, **named: Any) -> None:
        """Take the parts of `Core`, and find how calls are made."""
        super().__init__(*parts, **named)
        self.calls = self._find_calls()

    def _find_calls(self) -> Calls:
        if isinstance(self.transport, DirectTransport):
            return SharedCalls(self, cast(Any, self.kernels))
        if isinstance(self.transport, HierarchicalTransport) and self.transport.encloses:
            return NodeCalls(self, cast(Any, self.kernels))
        return GeneralCalls(self)

    def layout(self, topk_idx: Any, num_experts: Any, previous_event: Any) -> Layout:
        """Who gets each token. Local, so bad input raises on this rank alone."""
        try:
            wait(previous_event)
            return self.local.layout(topk_idx, num_experts)
        except ValueError as error:
            raise self.agreement.named("get_dispatch_layout", error) from None

    def combine_buffer(self, handle: Any) -> Tensor:
        """Rows for the experts' output, where combine finds them without copying."""
        try:
            known = self.known(handle)
        except ValueError as error:
            raise self.agreement.named("get_next_combine_buffer", error) from None
        by_expert = known.by_expert
        num_rows = known.ledger.num_rows if by_expert is None else by_expert.num_rows
        return self.transport.empty(num_rows, known.hidden, known.combine_dtype)

    def replicas(self, num_experts: Any, stage: str) -> Replicas:
        """Which experts lie in each rank's slots; `stage` is what the caller is called."""
        try:
            return self.local.replicas(num_experts)
        except ValueError as error:
            raise self.agreement.named(stage, error) from None

    def place(self, placement: Placement, mark: int) -> None:
        super().place(placement, mark)
        self.calls.forget()

    def refuse(self, error: Exception) -> None:
        """Meet the other ranks in whatever call they make, and make all ranks raise the error."""
        self.before_words()
        self.agreement.meet("dispatch", lack_of_memory(error, "dispatch", self.rank) or error)

    def close(self) -> None:
        """Wait for calls that still go on: they end, or fail, as any call does."""
        self.worker.close()
        self._wait_to_leave()
        self.failure.error = None  # whose traceback holds this engine
        self._leave()

    def abandon(self, first: Callable[[], None] | None) -> None:
        """Close a Buffer that nobody holds any more, on whatever thread, once `first` is done."""
        if os.getpid() != self.pid:  # a forked child must not touch what its parent still uses
            return

        def last() -> None:
            if first is not None and self.failure.error is None:
                first()
            self._wait_to_leave()
            self._leave()

        self.worker.close_then(last)

    def _wait_to_leave(self) -> None:
        if self.failure.error is None:
            self.calls.wait_to_leave()

    def _leave(self) -> None:
        del self.calls  # which hold this engine
        if self.balance is not None:
            self.balance.close()
        left = f"rank {self.rank} has closed its Buffer"
        self.communicator.report(PeerLeft(left, ranks=(self.rank,), stage="close"))
        self.transport.close()
        self.communicator.close()
