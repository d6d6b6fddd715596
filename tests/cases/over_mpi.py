"""Jobs that look at what Buffers over MPI share: openings, tags, and the lock of the process."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import torch

import tokenyard
from tests.cases import late_opening
from tests.cases.clock import scaled
from tests.cases.inside import engine_of


def two_openings(group: Any) -> list[float]:
    """Two threads open a Buffer each, over two communicators, in another order on each rank."""
    comms = [group.comm.Dup(), group.comm.Dup()]
    sums = [0.0, 0.0]

    def open_one(which: int) -> None:
        time.sleep(0.0 if which == group.rank() else scaled(0.3))
        with tokenyard.Buffer(
            comm=comms[which], transport="collective", timeout=scaled(15)
        ) as buffer:
            sums[which] = float(buffer.all_gather(torch.ones(1 + which)).x.sum())

    threads = [threading.Thread(target=open_one, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


def a_message_that_waits(group: Any) -> list[float]:
    """A Buffer has made as many parts as another's first tag is away. Its message is on its way
    while the other Buffer exchanges rows.
    """
    from tokenyard.comm import mpi as over_mpi

    over_mpi._TAGS = 8
    options: Any = {"transport": "collective", "timeout": scaled(20)}
    with (
        tokenyard.ElasticBuffer(group.comm, **options) as pipes,
        tokenyard.Buffer(comm=group.comm, **options) as rows,
    ):
        for inflight in range(1, 9):
            pipes.pp_set_config(1 << 12, inflight)
        if group.rank() == 1:
            pipes.pp_send(torch.full((1000,), 7.0), 0)
        got = rows.all_gather(torch.full((1,), float(group.rank()))).x
        received = torch.zeros(1000)
        if group.rank() == 0:
            pipes.pp_recv(received, 1)
    return [*got.tolist(), *received.unique().tolist()]


def more_buffers_than_tags(group: Any) -> tuple[list[float], int, str]:
    """Five Buffers at the same time where a duplicate has tags for two of them."""
    from tokenyard.comm import mpi as over_mpi

    comm = group.comm.Dup()
    over_mpi._TAGS = comm.Get_attr(over_mpi.MPI.TAG_UB) // 2
    with ExitStack() as stack:
        opened: list[Any] = [
            stack.enter_context(tokenyard.Buffer(comm=comm, transport="collective"))
            for _ in range(5)
        ]
        sums = [
            float(one.all_gather(torch.full((1,), float(n))).x[-1]) for n, one in enumerate(opened)
        ]
        num_duplicates = len({id(engine_of(one).communicator.joined.comm) for one in opened})
        over_mpi._TAGS = 8
        with tokenyard.Buffer(comm=group.comm, transport="collective") as buffer:
            communicator: Any = engine_of(buffer).communicator
            try:
                for number in range(8):
                    communicator.part(range(group.size()), str(number))
                said = "nothing"
            except ValueError as error:
                said = str(error)
    return sums, num_duplicates, said


def late(group: Any, is_first: bool) -> list[str]:
    from tokenyard.comm import mpi as over_mpi

    return late_opening.tries(over_mpi.MpiGroup(group.comm.Dup()), "collective", is_first)


class _Counted:
    """mpi4py's MPI, which notes how many threads are in its Testall at once."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.most = self.inside = 0
        self.counting = threading.Lock()
        self.Request = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def Testall(self, requests: Any) -> bool:
        with self.counting:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(1e-3)
        answer = self._real.Request.Testall(requests)
        with self.counting:
            self.inside -= 1
        return answer


def threads_in_mpi(group: Any) -> tuple[bool, int]:
    """Whether MPI wants one thread at a time, and how many were there."""
    from tokenyard.comm import mpi as over_mpi

    real = over_mpi.MPI
    counted: Any = _Counted(real)
    over_mpi.MPI = counted

    def work(comm: Any) -> None:
        with tokenyard.Buffer(comm=comm, transport="collective", timeout=scaled(20)) as buffer:
            for _ in range(20):
                buffer.all_gather(torch.ones(3, 5))

    threads = [threading.Thread(target=work, args=(group.comm.Dup(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    over_mpi.MPI = real
    return real.Query_thread() == real.THREAD_SERIALIZED, counted.most
