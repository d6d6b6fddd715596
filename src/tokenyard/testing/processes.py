"""Real ranks: processes of this machine with a torch.distributed group over gloo."""

from __future__ import annotations

import ctypes
import faulthandler
import io
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TypeVar

import torch

from tokenyard.errors import name_ranks

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the interface inside a machine

_CLONE_NEWNET = 0x40000000
_PORT = 29500  # of rank 0's store, in a namespace of its own


_Running = TypeVar("_Running", bound="Processes")


class RankFailed(AssertionError):
    """A rank's job raised; its traceback is in the message."""


@dataclass(frozen=True)
class Exited:
    """Stands for the result of a rank whose process ended (see Processes.run)."""

    exitcode: int | None


@dataclass(frozen=True)
class Seat:
    """Where a rank speaks from: a network namespace, its interface, and where rank 0 is heard."""

    namespace: str
    interface: str
    address_of_rank_0: str


class Processes:
    """R processes that stay: start them once, run many jobs.

        with Processes(4) as ranks:
            results = ranks.run(job, *args)

    `job(group, *args)` is a function of a module, which ranks import, or of the program itself: a
    script, with or without a guard around its main part, standard input, a notebook. Ranks do not
    run the program again; they are sent what the job needs of it.

    A job that takes longer than `timeout` seconds ends all processes, and the error shows where
    each one stood.
    """

    def __init__(
        self, num_ranks: int, *, timeout: float = 60.0, seats: Sequence[Seat] | None = None
    ) -> None:
        self.num_ranks = num_ranks
        self.timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="tokenyard-")
        method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
        context: Any = mp.get_context(method)
        if method == "forkserver":  # import torch and numba once, not once a rank
            context.set_forkserver_preload(["tokenyard.testing.preloaded"])
        pipes = [context.Pipe() for _ in range(num_ranks)]
        self._pipes = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(
                target=_serve,
                args=(rank, num_ranks, self._folder.name, theirs, seats[rank] if seats else None),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        with _hidden_main():
            for process in self.processes:
                process.start()
        for _, theirs in pipes:
            theirs.close()

    def run(
        self,
        job: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        may_die: bool = False,
    ) -> list[Any]:
        """What job(group, *args) returned on each rank; Exited for the dead, if they may be."""
        message = _pickler(job).dumps((job, args))
        waiting: dict[Connection, int] = {}
        answers: list[Any] = [None] * self.num_ranks
        for rank, pipe in enumerate(self._pipes):
            waiting[pipe] = rank
            with suppress(OSError):  # it is dead, and reading from it will say so
                pipe.send_bytes(message)
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        failed: list[str] = []
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = self._stacks(sorted(waiting.values()))
                self.close()
                raise not_ended(stacks, limit)
            for pipe in (pipe for pipe in ready if isinstance(pipe, Connection)):
                rank = waiting.pop(pipe)
                try:
                    ok, answer = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
                except (EOFError, OSError):
                    self.processes[rank].join(5)
                    ok, answer = may_die, Exited(self.processes[rank].exitcode)
                    if not ok:
                        answer = f"the process ended with exit code {answer.exitcode}"
                answers[rank] = answer
                if not ok:
                    failed.append(f"rank {rank} of {self.num_ranks}: {answer}")
        if failed:
            raise RankFailed("\n".join(failed))
        return answers

    def close(self) -> None:
        """End all ranks. One that is still at work after two seconds is killed."""
        for pipe in self._pipes:
            pipe.close()  # a rank that is idle sees the end of its pipe, and leaves
        deadline = time.monotonic() + 2.0
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self: _Running) -> _Running:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """The stacks of these ranks' threads, as they are now."""
        texts = dict.fromkeys(ranks, "")
        for rank in ranks:
            path = Path(self._folder.name, f"stack-{rank}")
            pid = self.processes[rank].pid
            if pid is not None and self.processes[rank].is_alive() and path.exists():
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.2)
                texts[rank] = path.read_text()
        return texts


def not_ended(stacks: dict[int, str], seconds: float, kind: str = "") -> TimeoutError:
    """Names the ranks that are late, and shows where each one stands."""
    where = "\n".join(f"rank {rank}:\n{stack}" for rank, stack in stacks.items())
    ranks = kind + name_ranks(list(stacks))
    return TimeoutError(f"{ranks} did not end within {seconds:g} s\n{where}")


def run_processes(
    job: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Start processes, call job(group, *args) on each rank, end them."""
    with Processes(num_ranks, timeout=timeout) as ranks:
        return ranks.run(job, *args)


def _pickler(job: Callable[..., Any]) -> Any:
    """Sends names of what modules define, and the definitions of what the program itself does."""
    if job.__module__ != "__main__":
        return pickle
    from numba import cloudpickle

    return cloudpickle


@contextmanager
def _hidden_main() -> Iterator[None]:
    """A process that is started inside does not run the program again to get at its functions."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve(
    rank: int, num_ranks: int, folder: str, pipe: Connection, seat: Seat | None = None
) -> None:
    import torch.distributed as dist

    # This process is ours alone, so its environment and threads are too.
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK if seat is None else seat.interface
    if seat is not None:
        _enter(seat.namespace)
    torch.set_num_threads(1)
    with open(Path(folder, f"stack-{rank}"), "w") as stack:
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
        store: dist.Store = dist.FileStore(str(Path(folder, "store")), num_ranks)
        if seat is not None:
            limit = timedelta(seconds=60)
            store = dist.TCPStore(seat.address_of_rank_0, _PORT, num_ranks, rank == 0, limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        while True:
            try:
                message = pipe.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)  # a group whose peers died may hang in its destructor
            pickler: Any = pickle
            try:
                job, args = pickle.loads(message)
                pickler = _pickler(job)
                answer = (True, job(dist.group.WORLD, *args))
            except BaseException:
                answer = (False, traceback.format_exc())
            file = io.BytesIO()
            torch.save(answer, file, pickle_module=pickler)
            pipe.send_bytes(file.getvalue())
            del answer  # the next job finds none of its memory held


def _enter(namespace: str) -> None:
    """Enter a network namespace, also with threads started later. (os.setns is Python 3.12's.)"""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
