"""The engine's path for GPU tensors, on a device that only keeps the order of what it is given."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tokenyard import opening, spec
from tokenyard.runtime.streams import Streams, streams_for
from tokenyard.testing import assert_same, numbered_tokens, routing, run_virtual


class FakeEvent:
    def __init__(self, api: FakeCuda) -> None:
        self.api = api
        self.stream = ""

    def record(self, stream: FakeStream) -> None:
        self.stream = stream.name
        self.api.log.append(f"record on {stream.name}")

    def query(self) -> bool:
        return False


class FakeStream:
    def __init__(self, api: FakeCuda, name: str) -> None:
        self.api, self.name = api, name

    def wait_stream(self, other: FakeStream) -> None:
        self.api.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.api.log.append(f"{self.name} waits for an event of {event.stream}")


class FakeCuda:
    """The names of torch.cuda that are used, of one rank: work is done at once, and noted."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.kept: list[int] = []
        self._current = FakeStream(self, "main")

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, "comm")

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        self.kept.append(tensor.data_ptr())


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeCuda]:
    """By thread, so by virtual rank: Buffers made meanwhile have streams."""
    made: dict[int, FakeCuda] = {}

    def fake(device: torch.device) -> Streams:
        made[threading.get_ident()] = api = FakeCuda()
        return Streams(device, api)

    monkeypatch.setattr(opening, "streams_for", fake)
    return made


def test_a_cpu_group_has_no_streams() -> None:
    assert streams_for(torch.device("cpu")) is None


def test_nothing_touches_cuda_on_a_cpu_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to ask whether there is one, but for capture(), which has no group."""

    def touched(name: str) -> Any:
        raise AssertionError(f"torch.cuda.{name} on a CPU group")

    names = ("current_stream", "Stream", "Event", "current_device", "is_available", "synchronize")
    for name in names:
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name, **__: touched(name))

    def job(group: Any) -> None:
        x, (topk_idx, weights) = numbered_tokens(4, 8), routing("uniform", 4, 2, 4)
        with tokenyard.Buffer(group, kernels="reference") as buffer:
            event = buffer.capture()
            got: Any = buffer.dispatch(
                x,
                topk_idx=topk_idx,
                topk_weights=weights,
                num_experts=4,
                previous_event=event,
                async_finish=True,
                allocate_on_comm_stream=True,
            )
            got.event.current_stream_wait()
            buffer.combine(got.recv_x, got.handle)
            assert buffer.get_comm_stream() == torch.cpu.current_stream()

    run_virtual(job, 2)


@pytest.mark.parametrize("async_finish", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("on_comm", [False, True], ids=["on-main", "on-comm"])
def test_calls_on_streams(devices: dict[int, FakeCuda], async_finish: bool, on_comm: bool) -> None:
    given = [
        (numbered_tokens(5, 8, first=9 * r), *routing("holes", 5, 2, 4, seed=r)) for r in (0, 1)
    ]

    def job(group: Any) -> tuple[Tensor, Tensor, list[str], list[str], int]:
        x, topk_idx, weights = given[group.rank()]
        how: dict[str, Any] = {"async_finish": async_finish, "allocate_on_comm_stream": on_comm}
        with tokenyard.Buffer(group, kernels="reference") as buffer:
            api = devices[threading.get_ident()]
            assert buffer.get_comm_stream().name == "comm"
            got: Any = buffer.dispatch(
                x, topk_idx=topk_idx, topk_weights=weights, num_experts=4, **how
            )
            dispatched, api.log[:] = list(api.log), []
            previous = got.event if async_finish else None
            sums = buffer.combine(got.recv_x, got.handle, previous_event=previous, **how)
            if async_finish:
                sums.event.current_stream_wait()
                assert not sums.event.is_over
            kept = {got.recv_x.data_ptr(), sums.x.data_ptr(), x.data_ptr()} & set(api.kept)
            again = buffer.dispatch(x, handle=got.handle, previous_event=previous, **how)
            assert_same(again.recv_x, got.recv_x)
            return got.recv_x, sums.x, dispatched, list(api.log), len(kept)

    world = spec.World.even(4, 2)
    layouts = [spec.layout(one[1], world) for one in given]
    want = spec.dispatch([one[0] for one in given], layouts, world)
    sums = spec.combine([one.x for one in want], layouts, world)
    for rank, (x, out, dispatched, combined, kept) in enumerate(run_virtual(job, 2).results):
        assert_same((x, out), (want[rank].x, sums[rank]))
        assert dispatched == [
            "comm waits for main",
            "record on comm",
            *([] if async_finish else ["main waits for an event of comm"]),
        ]
        assert "record on comm" in combined
        if async_finish:
            assert "comm waits for an event of comm" in combined  # the dispatch before it
            assert "main waits for an event of comm" in combined
            assert kept == 3  # their memory is not given away while the stream uses them
        if async_finish and on_comm:
            assert "comm waits for main" not in combined  # that is what it is for
        else:
            assert "comm waits for main" in combined
