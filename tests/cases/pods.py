"""Ranks as pods: each in PID, mount and network namespaces of its own, on nodes of a Cluster. A
folder of the machine is mounted in each of them, at a path of its own.

    python -m tests.cases.pods <a job of this module> <a file for what it returns>
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import tokenyard
from tests.cases import exchange, low_latency
from tests.cases.clock import scaled
from tokenyard.testing import Cluster


def cases(num_ranks: int) -> list[exchange.Case]:
    """On one node, and on nodes of two pods each, which share memory inside."""
    ways: list[dict[str, Any]] = [{}, {"transport": "ring"}, {"ranks_per_node": 2}]
    return [exchange.Case(num_ranks=num_ranks, num_biases=1, **way) for way in ways]


def exchange_in_both_modes(group: Any) -> dict[str, Any]:
    """Both modes, and how rows travelled."""
    with tokenyard.Buffer(group) as buffer:
        way = repr(buffer)
    plain = [exchange.job(group, case) for case in cases(group.size())]
    low = low_latency.job(group, low_latency.Case(num_ranks=group.size()))
    return {"way": way.partition(" on ")[2][:-1], "plain": plain, "low": low}


def exchange_once(group: Any) -> dict[str, Any]:
    x, ids = torch.ones(4, 8), torch.arange(group.size()).repeat(4, 1)
    with tokenyard.Buffer(group, timeout=scaled(30)) as buffer:
        got = buffer.dispatch(
            x, topk_idx=ids, topk_weights=torch.ones(ids.shape), num_experts=group.size()
        )
        assert isinstance(got.recv_x, torch.Tensor)
        sums = buffer.combine(got.recv_x, got.handle).x
        return {
            "way": repr(buffer).partition(" on ")[2][:-1],
            "good": bool((sums == len(ids[0])).all()),
        }


def go_on(group: Any, low: bool = False) -> dict[str, Any]:
    """Calls of growing size until something happens: what, and when."""
    size = group.size()
    options: dict[str, Any] = {"low_latency_mode": low, "timeout": scaled(3)}
    with tokenyard.Buffer(group, **options) as buffer:
        try:
            for turn in range(1_000_000):
                num_tokens = 64 if low else 64 + turn % 512
                x = torch.ones(num_tokens, 256, dtype=torch.bfloat16)
                ids = torch.arange(size).repeat(num_tokens, 1)
                if low:
                    buffer.low_latency_dispatch(x, ids, 64, size)
                else:
                    weights = torch.ones(ids.shape)
                    buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_experts=size)
                if turn == 20:
                    print("going", flush=True)
        except tokenyard.PeerError as error:
            # time.monotonic is the machine's: all namespaces have it.
            kind, at = type(error).__name__, time.monotonic()
            return {"kind": kind, "ranks": error.ranks, "text": str(error), "at": at}
    raise AssertionError("nothing happened")


def go_on_low(group: Any) -> dict[str, Any]:
    return go_on(group, low=True)


class Pods:
    """One rank a pod; `scripts` says how a pod is made ready, `settings` what it has set."""

    def __init__(
        self,
        box: Cluster,
        num_ranks: int,
        job: Callable[..., Any],
        place: Path,
        *,
        script: Callable[[int], str] = lambda rank: "true",
        settings: Callable[[int], Mapping[str, str]] | None = None,
        by: tuple[str, ...] = (),
    ) -> None:
        self._place, shared = place, place / "machine"
        shared.mkdir()
        self.processes = []
        for rank in range(num_ranks):
            mounted = place / f"pod-{rank}"
            mounted.mkdir()
            ready = f'mount --bind {shared} {mounted} && {script(rank)} && exec "$@"'
            together = {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_PORT": "29777"}
            together |= {"MASTER_ADDR": box.address(0), "GLOO_SOCKET_IFNAME": "eth0"}
            given = (
                {"TOKENYARD_SHARED_FOLDER": str(mounted)} if settings is None else settings(rank)
            )
            self.processes.append(
                subprocess.Popen(
                    box.command(
                        rank,
                        *("unshare", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child"),
                        *("sh", "-c", ready, "sh", *by),
                        *(sys.executable, "-m", "tests.cases.pods", job.__name__),
                        str(place / f"answer-{rank}"),
                    ),
                    env={**os.environ, **together, "OMP_NUM_THREADS": "1", **given},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def wait_until_going(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "going\n", process.communicate()

    def send(self, rank: int, number: signal.Signals) -> float:
        """Send a rank a signal, as its machine would: when."""
        parent = self.processes[rank].pid
        (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        os.kill(int(child), number)
        return time.monotonic()

    def answers(self, *ranks: int) -> tuple[list[dict[str, Any]], str]:
        """What these ranks' jobs returned, and all that they said."""
        said = ""
        for rank in ranks:
            process = self.processes[rank]
            said += process.communicate(timeout=scaled(120))[1]
            assert process.returncode == 0, said
        files = [self._place / f"answer-{rank}" for rank in ranks]
        return [torch.load(file, weights_only=False) for file in files], said


def main(job: str, answer: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.save(globals()[job](dist.group.WORLD), answer)
    sys.stdout.flush()
    os._exit(0)  # a group whose peers died may hang in its destructor


if __name__ == "__main__":
    main(*sys.argv[1:])
