"""All-gathers in sessions (V2's AGRS): memory for a session's results is taken once, and reused.

Where ranks share memory each writes its tensor straight into the results of all others. Where they
share none, an all-gather is a dispatch in which every row goes everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.compat.elastic.domains import ALIGNMENT
from tokenyard.compat.elastic.gathered import ALIGNED, SharedResults
from tokenyard.compat.elastic.refusal import heard_by_all
from tokenyard.compat.elastic.shared_block import as_bytes, meet, node_of
from tokenyard.engine.engine import Engine
from tokenyard.engine.gather import all_gather
from tokenyard.lifetime import Lifetime
from tokenyard.types import Config, round_up

Shape = tuple[int, ...] | torch.Size


class SessionCalls(Lifetime):
    """All-gathers between create_agrs_session and destroy_agrs_session.

    All ranks make the same all-gathers in the same order. Results are theirs until the session
    ends: then other ranks may write into them.
    """

    _results: SharedResults | None = None
    _agrs_limits: tuple[int, int] = (0, 0)  # bytes and all-gathers of a session
    _agrs_session = 0
    _in_session = False
    _agrs_offset = _agrs_slot = 0  # of the next all-gather

    def agrs_set_config(
        self, num_max_session_bytes: int, num_max_all_gathers_per_session: int
    ) -> None:
        """How many bytes the results of a session may take, and how many calls it may have. All
        ranks together, outside a session.
        """
        limits = num_max_session_bytes, num_max_all_gathers_per_session
        with self._use as engine:
            with heard_by_all(engine, "agrs_set_config"):
                validate.integer("num_max_session_bytes", limits[0], at_least=1, at_most=1 << 62)
                validate.integer("num_max_all_gathers_per_session", limits[1], at_least=1)
                validate.require(not self._in_session, "a session is open, want it destroyed")
            names = "num_max_session_bytes", "num_max_all_gathers_per_session"
            meet(engine, "agrs_set_config", dict(zip(names, limits)))
            node = node_of(engine)
            if limits != self._agrs_limits and node is not None:
                self._results = SharedResults(node, round_up(limits[0], ALIGNED), limits[1])
            self._agrs_limits = limits

    def create_agrs_session(self) -> None:
        """Begin a session. Waits until all ranks have ended the last one."""
        with self._use as engine:
            where = f"on rank {engine.rank}"
            validate.require(not self._in_session, f"a session is open already, {where}")
            validate.require(any(self._agrs_limits), f"want agrs_set_config first, {where}")
            if self._results is not None:
                self._results.begin()
            self._in_session, self._agrs_offset, self._agrs_slot = True, 0, 0
            self._agrs_session += 1

    def destroy_agrs_session(self) -> None:
        """End the session: its results may be overwritten from now on."""
        with self._use as engine:
            self._check_session(engine)
            self._in_session = False
            if self._results is not None:
                self._results.end()

    @contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """A session for the time of a `with`; nothing if not enabled."""
        if not enabled:
            yield
            return
        self.create_agrs_session()
        try:
            yield
        finally:
            if self._engine is not None:  # else the error that broke the buffer is on its way
                self.destroy_agrs_session()

    def agrs_get_inplace_tensor(
        self, shapes: Shape | Sequence[Shape], dtype: torch.dtype
    ) -> Tensor | tuple[Tensor, ...]:
        """Where the next all-gathers of tensors of these shapes need not copy this rank's own."""
        many = _shapes(shapes)
        with self._use as engine:
            self._check_session(engine)
            sizes = [math.prod(shape) * dtype.itemsize for shape in many]
            offsets, _ = self._places(engine, sizes)
            tensors = []
            for shape, size, offset in zip(many, sizes, offsets):
                if self._results is None:
                    made = torch.empty(shape, dtype=dtype, device=engine.transport.device)
                else:
                    made = self._results.part(offset, size).view(dtype).view(shape)
                tensors.append(made)
        return tuple(tensors) if many is shapes else tensors[0]

    def all_gather(self, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        """(gathered, handle), or (*gathered, handle) for a sequence: [R, ...] for each contiguous
        tensor, which may be read when handle() has returned. The same shapes on all ranks.
        """
        tensors = [t] if isinstance(t, Tensor) else list(t)
        with self._use as engine:
            self._check_session(engine)
            for one in tensors:
                validate.require(
                    isinstance(one, Tensor) and one.is_contiguous(),
                    f"all_gather: want contiguous tensors, on rank {engine.rank}",
                )
            offsets, end = self._places(engine, [one.nbytes for one in tensors])
            slot, session = self._agrs_slot, self._agrs_session
            if self._results is not None:
                gathered, due = self._results.gather(tensors, offsets, slot)
            else:
                gathered, due = [_gather(engine, one) for one in tensors], None
            self._agrs_offset, self._agrs_slot = end, slot + 1

        def handle() -> None:
            with self._use as engine:
                self._check_session(engine)
                validate.require(
                    session == self._agrs_session,
                    f"the all_gather is of an earlier session, on rank {engine.rank}",
                )
                if self._results is not None and due is not None:
                    self._results.wait(*due)

        return (*gathered, handle)

    def _check_session(self, engine: Engine) -> None:
        if not self._in_session:
            raise ValueError(f"no session is open, want create_agrs_session, on rank {engine.rank}")

    def _places(self, engine: Engine, sizes: Sequence[int]) -> tuple[list[int], int]:
        """Where results with parts of these sizes begin, and where the next one will."""
        offsets, end = [], self._agrs_offset
        for size in sizes:
            offsets.append(end)
            end += round_up(engine.num_ranks * size, ALIGNED)
        most, calls = self._agrs_limits
        if end > round_up(most, ALIGNED) or self._agrs_slot >= calls:
            raise ValueError(
                f"all_gather: call {self._agrs_slot + 1} of the session, whose results take {end} "
                f"bytes so far; want at most {calls} calls and {most} bytes, as agrs_set_config "
                f"says, on rank {engine.rank}"
            )
        return offsets, end

    @staticmethod
    def get_agrs_num_max_session_bytes(
        group: Any, shapes: Shape | Sequence[Shape], dtype: torch.dtype
    ) -> int:
        """Bytes of the results of tensors of these shapes."""
        each = [math.prod(shape) * dtype.itemsize for shape in _shapes(shapes)]
        return sum(round_up(group.size() * size, ALIGNED) for size in each)

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> int:
        """Bytes of a buffer for sessions of so many bytes: a multiple of 2 MB."""
        return round_up(num_max_session_bytes, ALIGNMENT)


def _shapes(shapes: Any) -> Any:
    """Several shapes as they are, one as a list of one."""
    return shapes if len(shapes) and isinstance(shapes[0], tuple) else [shapes]


def _gather(engine: Engine, t: Tensor) -> Tensor:
    if t.numel() == 0:
        return t.new_empty(engine.num_ranks, *t.shape)
    rows = as_bytes(t)[None]
    return all_gather(engine, rows, None, Config())[0].view(t.dtype).view(-1, *t.shape)
