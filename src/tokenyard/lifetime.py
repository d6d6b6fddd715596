"""How a Buffer lives: one call at a time, what a failed call leaves behind, and how it is closed.

`opening` says how it begins. `Buffer` adds the calls that users make.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd import profiler

from tokenyard.comm.loopback import LoopbackGroup
from tokenyard.engine.engine import Engine
from tokenyard.engine.failure import raised_on_all_ranks
from tokenyard.errors import BufferClosed, BufferInUse, PeerError
from tokenyard.low_latency.engine import LowLatency
from tokenyard.low_latency.handle import STAGE_OF
from tokenyard.runtime import afterwards, memory, observers, recorder
from tokenyard.runtime.copies import Once
from tokenyard.runtime.recorder import Recorder, Track

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Self = TypeVar("Self", bound="Lifetime")
_ANY = "call"


class Use:
    """The context of a call: one at a time, and afterwards the Buffer looks how it ended."""

    def __init__(self, buffer: Lifetime) -> None:
        self._buffer, self._lock = weakref.ref(buffer), threading.Lock()
        self._thread = 0  # the last one that took the lock
        group = buffer._group()
        self.seat = group.seat if isinstance(group, LoopbackGroup) else None  # a virtual rank's
        self.rank = -1
        # What the next call is called in traces and profiles. A call sets it; its end resets it.
        self.stage = _ANY
        self._began = 0  # when the call began, if somebody watches
        self._range: Any = None  # of torch's profiler
        self._recorder: Recorder | None = None  # of the last call that somebody watched
        self._track: Track | None = None  # there

    def __enter__(self) -> Engine:
        buffer = self._buffer()
        assert buffer is not None
        if os.getpid() != buffer._pid:  # before the lock: a fork may have inherited it taken
            buffer._check_process()
        if self.seat is not None:
            self.seat.check_thread()
        if not self._lock.acquire(False):
            self.take()
        self._thread = threading.get_ident()
        engine = buffer._engine
        if engine is not None and engine.failure.error is None:
            if recorder.active is not None or profiler._is_profiler_enabled:
                self._begin(engine)
            return engine
        try:
            return buffer._usable_engine()
        except BaseException:
            self._lock.release()
            raise

    def take(self) -> threading.Lock:
        """The lock, taken by this thread. Raises BufferInUse rather than wait for it."""
        if self.seat is not None:
            self.seat.check_thread()
        if not self._lock.acquire(blocking=False):
            who = "another thread"
            if self._thread == threading.get_ident():
                who = "this very thread, in a call that a signal handler has interrupted"
            raise BufferInUse(
                f"the Buffer is in use by {who}, want one call at a time, on rank {self.rank}"
            )
        self._thread = threading.get_ident()
        return self._lock

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        buffer = self._buffer()
        assert buffer is not None
        try:
            if error is not None:
                buffer._after_call(error)
            elif buffer._engine is not None:
                # The call has ended, or goes on on the Buffer's thread.
                buffer._engine.agreement.engaged = False
        finally:
            if self._began:
                self._end(buffer)
            self.stage = _ANY
            self._lock.release()

    def _begin(self, engine: Engine) -> None:
        active = recorder.active
        if active is not self._recorder:  # a trace has begun, or has ended
            self._recorder = active
            self._track = None if active is None else engine.track(active)
        self._began = time.monotonic_ns()
        if profiler._is_profiler_enabled:
            self._range = profiler.record_function(f"tokenyard::{self.stage.replace(' ', '_')}")
            self._range.__enter__()

    def _end(self, buffer: Lifetime) -> None:
        began, self._began = self._began, 0
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        track, engine = self._track, buffer._engine
        if track is not None and engine is not None and self._recorder is recorder.active:
            number, low_latency = engine.agreement.number, buffer._low_latency
            if self.stage in STAGE_OF and low_latency is not None:
                number = low_latency.numbers[STAGE_OF.index(self.stage)]
            track.call(self.stage, began, number)


class Lifetime(Once):
    """The engines of a Buffer until it is closed, or broken by a call that failed."""

    rank: int

    def __init__(self, group: Any, explicitly_destroy: bool) -> None:
        """Set what must be there before the engines are opened, since that may raise."""
        # Weakly, since a group that outlives its destruction aborts the process at exit.
        self._group = weakref.ref(group)
        self.explicitly_destroy = explicitly_destroy
        self._engine: Engine | None = None
        self._low_latency: LowLatency | None = None
        self._why_closed = "the Buffer is closed"
        self._last_figures: dict[str, Any] = {}
        self._pid = os.getpid()
        self._use = Use(self)
        # Objects beside this one that use its memory, each with a method `forget`.
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()

    def _opened(self, engine: Engine, low_latency: LowLatency | None) -> None:
        self._engine, self._low_latency = engine, low_latency
        self.rank = self._use.rank = engine.rank
        if not self.explicitly_destroy:
            first = low_latency.wait_to_leave if low_latency is not None else None
            afterwards.start()
            self._finalizer = weakref.finalize(
                self, afterwards.leave, partial(engine.abandon, first)
            )
            self._finalizer.atexit = False

    @property
    def group(self) -> ProcessGroup | Any:
        """The group it was made for; None once that was destroyed."""
        if self._use.seat is not None:  # `buffer.group != group` asks whose Buffer this is
            self._use.seat.check_thread()
        return self._group()

    def get_comm_stream(self) -> Any:
        """The stream that communication runs on: on CPU, the only one."""
        streams = self._open_engine().streams
        return torch.cpu.current_stream() if streams is None else streams.comm

    def stats(self, reset: bool = False) -> dict[str, Any]:
        """What this rank has done since it made the Buffer, or last reset these figures:

            nodes        for each rank the number of the node that it is on
            stages       by stage: calls, seconds in them, rows sent and received, bytes sent
            ways         by stage: how many calls were `compiled`, made in one compiled call, and
                         how many step by step: `enclosed` if their rows went with the words in
                         which nodes agree on the call, else `general`
            bytes        of the rows sent, by link: itself, shared memory, network
            rows_to      for each rank the rows that went there, of all stages; bytes_to likewise
            waited_for   by rank: seconds that this rank waited, and that rank came last
            came_last    by rank: how many waits it ended so
            memory       bytes held now, by part: `results` are shared segments of this Buffer,
                         `process` is memory for other results, of all Buffers of this process
            expert_load  for each local expert, with a balance for each of the node, the (token, k)
                         pairs that it has got here
            balance      of Buffers with one, since rows came: pairs of the busiest rank of the
                         node / mean, by owner and as they were shared; pairs that this rank has
                         borrowed, experts (each call's counted), and bytes of their weights; or
                         None

        Plain values, which json can write. Local: ranks exchange nothing. Any thread may ask; what
        a call counts while somebody asks may be seen in part. With `reset` the figures, but for
        memory, begin anew afterwards. Those of a closed Buffer are what they were when it closed.
        """
        self._check_process()
        engine = self._engine
        if engine is None:
            return copy.deepcopy(self._last_figures)
        found = {
            "rank": engine.rank,
            "num_ranks": engine.num_ranks,
            "transport": engine.transport.name,
            "nodes": list(engine.topology.node_of_rank),
            **engine.statistics.snapshot(),
            "balance": None if engine.balance is None else engine.balance.figures(),
            "memory": {**engine.transport.memory(), "process": memory.held()},
        }
        if reset:
            engine.statistics.reset()
            if engine.balance is not None:
                engine.balance.reset()
        return found

    def close(self) -> None:
        """Give back what the Buffer holds; twice is fine. Local, with one exception: where another
        rank is yet to call the hook of a low-latency call that has ended here, close waits for
        that, 5 seconds at most.
        """
        if self._engine is None:
            return
        if os.getpid() != self._pid:  # a fork, whose parent still uses all this
            self._engine = self._low_latency = None
            return
        lock = self._use.take()
        try:
            if self._low_latency is not None:
                self._engine.worker.wait()  # a call that ends there names memory too
                if self._engine.failure.error is None:
                    self._low_latency.wait_to_leave()
            self._close()
        finally:
            lock.release()

    def _close(self) -> None:
        engine = self._engine
        if engine is not None:
            self._last_figures = self.stats()
            self._engine = self._low_latency = None
            if not self.explicitly_destroy:
                self._finalizer.detach()
            while self._users:
                self._users.pop().forget()
            engine.close()
            for tell in observers.closed:
                tell()

    def destroy(self) -> None:
        """DeepEP's name for close."""
        self.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def dead_ranks(self) -> tuple[int, ...]:
        """Ranks of this machine that have died. Of other machines' ranks only a call of all ranks
        can tell. Any thread may ask. () once the Buffer is closed.
        """
        engine = self._engine
        return () if engine is None else engine.transport.dead_ranks()

    def refuse(self, error: Exception) -> None:
        """For a rank that cannot make the dispatch or combine that the others wait in: raise the
        error here, and PeerInputError on the other ranks. The Buffer goes on working.
        """
        with self._use as engine:
            engine.refuse(error)

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        """What an error of torch.distributed between the same ranks means: PeerDied with the ranks
        that are gone, or PeerTimeout. For collectives of your own, whose errors name no ranks:

        try:
            dist.all_reduce(tensor, group=group)
        except RuntimeError as error:
            raise buffer.explain("all_reduce", error) from error
        """
        return self._open_engine().transport.explain(stage, error)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise BufferClosed(
                f"the Buffer belongs to process {self._pid}, of which this one is a fork; want a "
                f"Buffer of its own here, in a process that was not forked, on rank {self.rank}"
            )

    def _open_engine(self) -> Engine:
        self._check_process()
        return self._usable_engine()

    def _usable_engine(self) -> Engine:
        engine = self._engine
        failed = None if engine is None else engine.failure.error
        if failed is not None:  # on the Buffer's thread, or in a hook
            self._broken()
        if self._engine is None:
            raise BufferClosed(f"{self._why_closed}, on rank {self.rank}") from failed
        return self._engine

    def _open_low_latency(self, is_open: bool = False) -> LowLatency:
        if not is_open:
            self._open_engine()
        if self._low_latency is None:
            raise ValueError(
                f"low_latency_mode is False, want Buffer(low_latency_mode=True), "
                f"on rank {self.rank}"
            )
        return self._low_latency

    def _after_call(self, error: BaseException) -> None:
        """Break the Buffer if the call failed after others had begun to rely on it."""
        engine, low_latency = self._engine, self._low_latency
        if engine is None:
            return
        engaged = engine.agreement.engaged or engine.failure.error is not None
        if low_latency is not None:
            engaged |= low_latency.engaged
        engine.agreement.engaged = False
        if isinstance(error, PeerError) or (engaged and not raised_on_all_ranks(error)):
            engine.failure.give_up(error)
            self._broken()

    def _broken(self) -> None:
        """After a failure the engine is in no known state, so nothing may use it again."""
        assert self._engine is not None
        self._why_closed = self._engine.failure.why_closed
        self._close()
