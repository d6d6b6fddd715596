"""What shared memory adds: results that stay, memory that comes back, and doing without it."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.inside import transport_of
from tests.cases.processes import Pools
from tokenyard import SharedMemoryError
from tokenyard.shm import segment
from tokenyard.shm.segment import Segment
from tokenyard.testing import Processes, assert_same, numbered_tokens, routing, run_virtual

pytestmark = pytest.mark.processes


@pytest.fixture
def ranks(processes: Pools) -> Processes:
    return processes(3)


def dispatch(buffer: tokenyard.Buffer, turn: int, num_tokens: int = 40) -> Any:
    rank = buffer.rank
    x = numbered_tokens(num_tokens, 256, first=10_000 * turn + 100 * rank)
    topk_idx, weights = routing("uniform", num_tokens, 4, 12, seed=7 * turn + rank)
    return buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=12)


def num_segments(buffer: tokenyard.Buffer) -> int:
    return len(list(transport_of(buffer).node.pool))


def hold_and_go_on(group: Any, rounds: int) -> tuple[bool, int]:
    with tokenyard.Buffer(group, transport="direct") as buffer:
        held = dispatch(buffer, 0)
        parts = (held.recv_x, held.recv_topk_idx, held.recv_topk_weights, held.handle.recv_src_idx)
        before = [part.clone() for part in parts]
        for turn in range(1, rounds):
            got = dispatch(buffer, turn)
            buffer.combine(got.recv_x, got.handle)
        assert_same([*parts], before)
        again = dispatch(buffer, 0)
        assert_same(again.recv_x, held.recv_x)
        return again.recv_x.data_ptr() != held.recv_x.data_ptr(), num_segments(buffer)


def test_a_result_that_is_held_is_never_overwritten(ranks: Processes) -> None:
    for elsewhere, segments in ranks.run(hold_and_go_on, 1000):
        assert elsewhere
        assert segments <= 8  # dead results' memory was used again


def combine_a_slice(group: Any) -> dict[str, int]:
    with tokenyard.Buffer(group, transport="direct") as buffer:
        large, small = dispatch(buffer, 0), dispatch(buffer, 1, num_tokens=10)
        want = buffer.combine(small.recv_x, small.handle).x
        rows = large.recv_x[3 : 3 + len(small.recv_x)]
        rows.copy_(small.recv_x)
        assert_same(buffer.combine(rows, small.handle).x, want)
        return buffer.stats()["ways"]["combine"]


def test_rows_may_lie_anywhere_in_another_result(ranks: Processes) -> None:
    for ways in ranks.run(combine_a_slice):
        assert ways == {"compiled": 2, "enclosed": 0, "general": 0}


def resident_after(group: Any, rounds: int) -> tuple[int, int]:
    """Pages of this process after half of the rounds, when it has what it needs, and after all."""

    def pages() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1])

    with tokenyard.Buffer(group, transport="direct") as buffer:
        early = 0
        for turn in range(rounds):
            got = dispatch(buffer, turn, num_tokens=20 + turn % 30)
            buffer.combine(got.recv_x, got.handle)
            if turn == rounds // 2:
                early = pages()
        return early, pages()


@pytest.mark.parametrize("rounds", [500, pytest.param(5000, marks=pytest.mark.slow)])
def test_memory_stays_flat(ranks: Processes, rounds: int) -> None:
    for early, late in ranks.run(resident_after, rounds):
        assert late < early + 128  # half a MiB of pages


def many_rounds(group: Any, rounds: int) -> int:
    """Sums that can be told without a specification: every row comes back as it was sent."""
    with tokenyard.Buffer(group, transport="direct") as buffer:
        for turn in range(rounds):
            x = numbered_tokens(3, 64, first=1000 * turn + 3 * group.rank(), dtype=torch.float64)
            topk_idx, weights = routing("holes", 3, 2, 64, seed=turn * group.size() + group.rank())
            got: Any = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=64)
            back = buffer.combine(got.recv_x, got.handle).x
            copies = got.handle.is_token_in_rank.sum(1, keepdim=True)
            assert_same(back, x * copies + 0.0, f"round {turn}")  # a sum of nothing is +0.0
    return rounds


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "num_ranks, rounds", [(16, 30), pytest.param(64, 200, marks=pytest.mark.slow)]
)
def test_many_more_ranks_than_cores(num_ranks: int, rounds: int) -> None:
    with Processes(num_ranks, timeout=scaled(800)) as many:
        assert many.run(many_rounds, rounds) == [rounds] * num_ranks


def combine_in_place(group: Any) -> list[bool]:
    with tokenyard.Buffer(group, transport="direct") as buffer:
        got = dispatch(buffer, 1)
        ordinary = buffer.combine(got.recv_x * 2, got.handle).x
        shared = buffer.get_next_combine_buffer(got.handle)
        assert shared.shape == got.recv_x.shape
        assert shared.dtype == got.recv_x.dtype
        torch.mul(got.recv_x, 2, out=shared)
        before = num_segments(buffer)
        in_place = buffer.combine(shared, got.handle).x
        shared.zero_()  # it is ours again: all ranks have read it
        return [torch.equal(ordinary, in_place), num_segments(buffer) <= before + 1]


def test_combine_buffer_gives_the_same_bits(ranks: Processes) -> None:
    assert ranks.run(combine_in_place) == [[True, True]] * 3


def too_small(group: Any) -> tuple[str, str, Any]:
    """Rank 1 may make no file, memory files too, larger than 1 MiB."""
    with tokenyard.Buffer(group, transport="direct", timeout=scaled(60)) as buffer:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if group.rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(SharedMemoryError) as caught:
                dispatch(buffer, 0, num_tokens=8000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return type(caught.value).__name__, str(caught.value), len(dispatch(buffer, 0).recv_x)


def test_too_little_memory_on_one_rank_is_an_error_on_all(ranks: Processes) -> None:
    outcomes = ranks.run(too_small)
    assert all(kind == "SharedMemoryError" for kind, _, _ in outcomes)
    for rank in (0, 2):
        assert outcomes[rank][1] == (
            f"dispatch: rank 1 could not get memory for its rows, on rank {rank}"
        )
    assert "bytes of shared memory are needed" in outcomes[1][1]
    assert "raise its limit with `ulimit -f`" in outcomes[1][1]
    assert all(rows > 0 for _, _, rows in outcomes)  # and the Buffer goes on working


def cannot_attach(group: Any, transport: str) -> str:
    """Rank 2 sees no other process's memory, as in a container of its own."""
    real = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **kwargs)

    if group.rank() == 2:
        segment.os.open = refuse
    try:
        with tokenyard.Buffer(group, transport=transport) as buffer:
            dispatch(buffer, 0)
            return str(buffer.stats()["transport"])
    except ValueError as error:
        return str(error)
    finally:
        segment.os.open = real


def test_ranks_that_cannot_share_memory_take_the_collective_transport(ranks: Processes) -> None:
    assert ranks.run(cannot_attach, "auto") == ["collective over gloo"] * 3
    for rank, text in enumerate(ranks.run(cannot_attach, "direct")):
        assert text.startswith("transport 'direct' cannot be used: rank 2 cannot attach")
        assert ("Permission denied" in text) == (rank == 2)


def no_memory_at_all(group: Any) -> str:
    """Rank 0 can make no segment, as where a profile of seccomp forbids it: a mock of that. (A
    limit on files would stop the store of the test's group too.)
    """
    real = segment.os.memfd_create

    def forbidden(*args: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    if group.rank() == 0:
        segment.os.memfd_create = forbidden  # type: ignore[assignment]
    try:
        with tokenyard.Buffer(group, timeout=scaled(60)) as buffer:
            return str(buffer.stats()["transport"])
    finally:
        segment.os.memfd_create = real


def test_without_any_shared_memory_all_take_the_collective_transport(
    ranks: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ranks.run(no_memory_at_all) == ["collective over gloo"] * 3
    monkeypatch.delattr(os, "memfd_create")
    assert segment.why_not() == "this system has no memfd or no pidfd (they are Linux's)"


def reference_kernels(group: Any, transport: str) -> str:
    kernels = "reference" if group.rank() == 1 else "numba"
    try:
        with tokenyard.Buffer(group, transport=transport, kernels=kernels) as buffer:
            return str(buffer.stats()["transport"])
    except ValueError as error:
        return str(error)


def test_kernels_without_signals_take_the_collective_transport() -> None:
    assert set(run_virtual(reference_kernels, 3, "auto").results) == {"collective over loopback"}
    texts = run_virtual(reference_kernels, 3, "direct").results
    assert texts[0] == "transport 'direct' cannot be used: rank 1 cannot share memory"
    assert "the kernel set has no signals (take numba)" in texts[1]


def leftovers(group: Any) -> tuple[int, int]:
    """Open files before and after a few Buffers."""

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    tokenyard.Buffer(group, transport="direct").close()
    before = count()
    for turn in range(5):
        with tokenyard.Buffer(group, transport="direct") as buffer:
            got = dispatch(buffer, turn)
            buffer.combine(got.recv_x, got.handle)
            del got
    return before, count()


def test_closed_buffers_leave_nothing_open(ranks: Processes) -> None:
    for before, after in ranks.run(leftovers):
        assert after == before
    assert not [name for name in os.listdir("/dev/shm") if "tokenyard" in name]


def test_segments_are_sealed_and_live_as_long_as_their_tensors() -> None:
    segment = Segment(1 << 16)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 10)
    tensor = torch.from_numpy(segment.array()[64:128])
    segment.close()
    tensor.fill_(7)
    assert tensor.sum() == 7 * 64
