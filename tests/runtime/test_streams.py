"""The engine's path for GPU tensors, on a device that only keeps the order of what it is given."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tokenyard
from tokenyard import opening, spec
from tokenyard.comm import base as comm_base
from tokenyard.kernels.base import interprets_triton
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
        self.waits: list[str] = []  # what the host has read of the device
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


def launching() -> Any:
    return importlib.import_module("tokenyard.kernels.triton.launch")


class HostReads(TorchFunctionMode):
    """Notes when the host reads a tensor, and would wait for its device: but not what kernels do,
    which are interpreted here.
    """

    READS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__index__")

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits, self.in_kernel = waits, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.READS and not self.in_kernel:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeCuda], HostReads]:
    """reads(device) is a context in which one virtual rank's device notes how often the host waits
    for it.
    """
    modes: dict[int, HostReads] = {}
    launch, to_host = launching()._on_device_of, comm_base.to_host

    @contextmanager
    def running(arguments: Any) -> Iterator[None]:
        mode = modes.get(threading.get_ident())
        with launch(arguments):
            if mode is not None:
                mode.in_kernel = True
            yield
            if mode is not None:
                mode.in_kernel = False

    def noted(numbers: Tensor) -> Any:
        mode = modes.get(threading.get_ident())
        if mode is not None:
            mode.waits.append("to_host")
        return to_host(numbers)

    def read(device: FakeCuda) -> HostReads:
        return modes.setdefault(threading.get_ident(), HostReads(device.waits))

    monkeypatch.setattr(launching(), "_on_device_of", running)
    monkeypatch.setattr(comm_base, "to_host", noted)
    return read


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


INTERPRETED = pytest.mark.skipif(
    not interprets_triton(), reason="needs triton and TRITON_INTERPRET=1"
)


def count_and_send(
    group: Any, devices: dict[int, FakeCuda], reads: Any, ranks_per_node: int | None
) -> Any:
    """A dispatch with the layout that it counts, in turn with other sizes, and a combine."""
    rank, out = group.rank(), []
    with tokenyard.Buffer(group, kernels="triton", ranks_per_node=ranks_per_node) as buffer:
        device = devices[threading.get_ident()]
        for turn in range(3):
            x, topk_idx, weights = counted_input(turn, rank)
            with reads(device):
                got: Any = buffer.dispatch(
                    x, topk_idx=topk_idx, topk_weights=weights, num_experts=6
                )
                waits, device.waits[:] = list(device.waits), []
                sums = buffer.combine(got.recv_x, got.handle).x
                device.waits.clear()
            named = got.recv_x, got.recv_topk_idx, got.num_recv_tokens_per_expert_list, sums
            out.append((waits, named))
    return out


def counted_input(turn: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = (5, 0, 70)[(turn + rank) % 3]
    x = numbered_tokens(num_tokens, 8, first=100 * turn + 10 * rank)
    return x, *routing("holes", num_tokens, 3, 6, seed=10 * turn + rank)


@pytest.mark.triton
@INTERPRETED
@pytest.mark.parametrize("ranks_per_node", [None, 2], ids=["one-node", "two-nodes"])
def test_a_counting_dispatch_waits_once(
    devices: dict[int, FakeCuda], reads: Any, ranks_per_node: int | None
) -> None:
    """For the words of the others, with which the host reads its own counts."""
    size = 3
    run = run_virtual(count_and_send, size, devices, reads, ranks_per_node)
    world = spec.World.even(6, size, ranks_per_node)
    for turn in range(3):
        every = [counted_input(turn, rank) for rank in range(size)]
        layouts = [spec.layout(one[1], world) for one in every]
        want = spec.dispatch(
            [one[0] for one in every],
            layouts,
            world,
            topk_idxs=[one[1] for one in every],
            topk_weights=[one[2] for one in every],
        )
        sums = spec.combine([one.x for one in want], layouts, world)
        for rank, turns in enumerate(run.results):
            waits, (x, topk_idx, per_expert, out) = turns[turn]
            assert_same((x, topk_idx, out), (want[rank].x, want[rank].topk_idx, sums[rank]))
            assert per_expert == want[rank].num_tokens_per_expert
            if turn:  # the first call also makes the tables of the placement
                assert waits == ["to_host"]


@pytest.mark.triton
@INTERPRETED
def test_a_bad_index_that_only_the_device_sees(devices: dict[int, FakeCuda]) -> None:
    """All ranks raise, with the same words as on CPU, and the Buffer goes on."""

    def job(group: Any) -> tuple[str, int]:
        rank, said = group.rank(), ""
        with tokenyard.Buffer(group, kernels="triton") as buffer:
            for bad in (7, 0):
                topk_idx = torch.zeros(4, 2, dtype=torch.int64)
                topk_idx[:, 1] = 1
                topk_idx[3, 1] = bad if rank == 1 and bad else 1
                try:
                    got: Any = buffer.dispatch(
                        torch.ones(4, 8),
                        topk_idx=topk_idx,
                        topk_weights=torch.ones(4, 2),
                        num_experts=2,
                    )
                except (ValueError, tokenyard.PeerInputError) as error:
                    said = f"{type(error).__name__}: {error}"
        return said, len(got.recv_x)

    other, mine = run_virtual(job, 2).results
    text = "dispatch: topk_idx[3, 1] is 7, want -1..1 (num_experts=2), on rank 1"
    assert mine == (f"ValueError: {text}", 8)
    assert other == (f"PeerInputError: rank 1 rejected its input, so no rank went on: {text}", 8)
