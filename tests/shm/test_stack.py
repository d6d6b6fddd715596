"""Stacks of experts that the ranks of a node share: one tensor in each process, no second copy."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tests.cases.shared_memory import files_and_maps, in_a_child
from tokenyard.runtime import limits
from tokenyard.shm import stack as stacks
from tokenyard.testing import Exited, Processes, run_virtual

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no shared memory"),
]

PART = 64 << 20  # bytes of a rank
SHAPES = [
    ([2, 3, 0, 1], (5, 7), torch.float32),
    ([4, 4, 4, 4], (64, 32), torch.bfloat16),
    ([1, 2, 3, 4], (), torch.float64),
    ([0, 0, 0, 0], (3,), torch.int32),
    ([1, 2, 3, 4], (0, 4), torch.int8),
    ([3, 1, 2, 2], (3, 1), torch.bool),
    ([16, 8, 24, 8], (64,), torch.float8_e4m3fn),
]
WAYS: list[dict[str, Any]] = [
    {},
    {"transport": "collective"},
    {"transport": "ring"},
    {"ranks_per_node": 2},
]


def part_of(rank: int, length: int, inner: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 100, (length, *inner), generator=generator).to(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    bytes_of = [x.clone().view(-1).view(torch.uint8) for x in (one, other)]
    return one.shape == other.shape and torch.equal(*bytes_of)


def share_all(group: Any, options: dict[str, Any]) -> None:
    rank, size = group.rank(), group.size()
    with tokenyard.Buffer(group, **options) as buffer:
        nodes = buffer.stats()["nodes"]
        here = [other for other in range(size) if nodes[other] == nodes[rank]]
        for lengths, inner, dtype in SHAPES:
            parts = [part_of(other, lengths[other], inner, dtype) for other in range(size)]
            got = buffer.share_stack(parts[rank])
            assert same(got.own, parts[rank])
            assert same(got.node, torch.cat([parts[other] for other in here]))
            assert got.own.is_contiguous()
            assert got.node.is_contiguous()
            buffer.all_gather(torch.zeros(1))  # all have looked
            got.own.fill_(0)
            buffer.all_gather(torch.zeros(1))
            assert not got.node.float().any()


@pytest.mark.parametrize("num_ranks", at_night([1, 2, 4], gate=(4,)))
@pytest.mark.parametrize("options", WAYS, ids=lambda one: str([*one.values()]))
def test_the_node_has_the_stacks_of_all_its_ranks(
    processes: Pools, num_ranks: int, options: dict[str, Any]
) -> None:
    if num_ranks < options.get("ranks_per_node", 1):
        options = {}
    processes(num_ranks).run(share_all, options)


def test_virtual_ranks_share_too() -> None:
    run_virtual(share_all, 3, {})


def whole(group: Any, folder: str | None = None) -> tuple[bool, int, list[str], int]:
    """What real sizes look like: one tensor without gaps, in which others' parts can be read."""
    if folder is not None:
        os.environ["TOKENYARD_SHARED_FOLDER"] = folder
    with tokenyard.Buffer(group) as buffer:
        before = set(files_and_maps())
        got = buffer.share_stack(torch.full((3, 128, 64), float(buffer.rank)))
        added = [one for one in files_and_maps() if one not in before]
        values = got.node[:, 0, 0].tolist()
        assert values == [float(rank) for rank in range(buffer.group_size) for _ in range(3)]
        assert got.node.untyped_storage().nbytes() == got.node.nbytes
        assert got.own.untyped_storage().nbytes() == got.own.nbytes  # what torch.save writes
    allowed = [one.split()[1] for one in added if " " in one]
    del got
    gc.collect()
    return True, len(added), allowed, len(set(files_and_maps()) - before)


def test_others_can_be_read_alone_and_nothing_stays(processes: Pools) -> None:
    for rank, (_, added, allowed, left) in enumerate(processes(3).run(whole)):
        assert allowed == ["rw-s" if other == rank else "r--s" for other in range(3)]
        assert added == 3  # maps, and no descriptor
        assert left == 0


def test_ranks_find_each_other_by_a_folder(tmp_path: Path) -> None:
    with Processes(2, timeout=scaled(60)) as ranks:
        for _, added, _, left in ranks.run(whole, str(tmp_path)):
            assert (added, left) == (2, 0)


def write_elsewhere(group: Any) -> float:
    with tokenyard.Buffer(group, timeout=scaled(20)) as buffer:
        got = buffer.share_stack(torch.ones(1, 4096))
        if buffer.rank == 1:
            ctypes.memset(got.node[0].data_ptr(), 0, 1)
        return float(got.node[0].sum())


def test_who_writes_to_the_part_of_another_dies() -> None:
    with Processes(2, timeout=scaled(60)) as ranks:
        assert ranks.run(write_elsewhere, may_die=True) == [4096.0, Exited(-signal.SIGSEGV)]


def proportional() -> int:
    """PSS: bytes of this process, of which those that n processes share count 1/n."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(text.partition("\nPss:")[2].split()[0])


def measure(group: Any) -> tuple[int, int, int]:
    with tokenyard.Buffer(group) as buffer:

        def pss() -> int:
            gc.collect()
            buffer.all_gather(torch.zeros(1))  # all have come here, and none goes on
            found = proportional()
            buffer.all_gather(torch.zeros(1))
            return found

        buffer.share_stack(torch.ones(1, 4096))
        own = torch.ones(16, PART // 64)
        before = pss()
        got = buffer.share_stack(own)
        del own
        assert got.node.sum() == buffer.group_size * 16 * (PART // 64)  # all pages are read
        during = pss()
        del got
        return before, during, pss()


def test_the_memory_of_all_processes_is_that_without_sharing(processes: Pools) -> None:
    before, during, after = (sum(one) for one in zip(*processes(2).run(measure)))
    assert abs(during - before) < 0.01 * before, (before, during)
    assert after < before - 2 * 0.9 * PART, (before, after)


def outlive(group: Any, folder: str) -> Any:
    buffer = tokenyard.Buffer(group, timeout=scaled(20))
    rank = buffer.rank
    got = buffer.share_stack(torch.full((2, 1024, 64), float(rank)))
    Path(folder, f"{rank}").touch()
    deadline = time.monotonic() + scaled(20)
    while time.monotonic() < deadline:  # all read all the time
        assert got.node.mean(dim=(1, 2)).tolist() == [0, 0, 1, 1, 2, 2]
        if rank == 1 and len(os.listdir(folder)) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if buffer.dead_ranks():
            break
    gc.collect()
    values = got.node.mean(dim=(1, 2)).tolist()
    try:
        buffer.all_gather(torch.zeros(1))
    except tokenyard.PeerError as error:
        return values, type(error).__name__, error.ranks
    return values


def test_what_a_killed_rank_has_left_can_be_read(tmp_path: Path) -> None:
    with Processes(3, timeout=scaled(60)) as ranks:
        first, second, third = ranks.run(outlive, str(tmp_path), may_die=True)
    assert second == Exited(-signal.SIGKILL)
    assert first == third == ([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], "PeerDied", (1,))


def die_inside(group: Any, where: str, options: dict[str, Any]) -> Any:
    buffer = tokenyard.Buffer(group, timeout=scaled(10), **options)
    if buffer.rank == 1:
        die = mock.Mock(side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with mock.patch.object(stacks.Making, where, die):
            buffer.share_stack(torch.ones(2, 1024))
    begin = time.monotonic()
    try:
        buffer.share_stack(torch.ones(2, 1024))
    except tokenyard.PeerError as error:
        return error.ranks, time.monotonic() - begin < scaled(15)
    return None


@pytest.mark.parametrize("options", at_night(WAYS[:2], gate=(WAYS[0],)), ids=str)
@pytest.mark.parametrize("where", ["take", "map"])
def test_a_rank_that_dies_inside_is_named(where: str, options: dict[str, Any]) -> None:
    with Processes(3, timeout=scaled(60)) as ranks:
        first, second, third = ranks.run(die_inside, where, options, may_die=True)
    assert second == Exited(-signal.SIGKILL)
    assert first == third == ((1,), True)


def given(name: str) -> Any:
    x = torch.ones(2, 8)
    return {
        "shape": torch.ones(2, 9),
        "dtype": x.double(),
        "nothing": None,
        "scalar": torch.tensor(1.0),
        "meta": x.to("meta"),
        "sparse": x.to_sparse(),
    }[name]


def wrong(group: Any, name: str) -> tuple[str, str, list[float]]:
    with tokenyard.Buffer(group, timeout=scaled(20)) as buffer:
        own, kind, text = torch.full((2, 8), float(buffer.rank)), "", ""
        try:
            buffer.share_stack(own if buffer.rank == 0 else given(name))
        except ValueError as error:
            kind, text = type(error).__name__, str(error)
        return kind, text, buffer.share_stack(own).node[:, 0].tolist()  # it goes on


WRONG = {
    "shape": "ranks differ in the shape of an expert",
    "dtype": "ranks differ in the shape of an expert, or its dtype",
    "nothing": "own is None, want a torch.Tensor, on rank 1",
    "scalar": "own is a Tensor of shape [], dtype torch.float32 and layout torch.strided on cpu",
    "meta": "on meta, want a plain torch.Tensor [experts, ...] on cpu, on rank 1",
    "sparse": "layout torch.sparse_coo on cpu, want a plain torch.Tensor",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_raises_on_all_ranks(processes: Pools, name: str) -> None:
    for kind, text, values in processes(2).run(wrong, name):
        assert kind in ("ValueError", "PeerInputError", "CallMismatch")
        assert WRONG[name] in text
        assert values == [0, 0, 1, 1]


def lack(group: Any, what: str) -> tuple[str, list[float], int]:
    with tokenyard.Buffer(group, timeout=scaled(20)) as buffer:
        size = 1 << 20 if what == "memory" else 1 << 10
        own, said = torch.full((2, size), float(buffer.rank)), ""
        before = set(files_and_maps())

        def no_descriptor(*_: Any) -> int:
            raise PermissionError(13, "Permission denied")

        patches: dict[str, Any] = {
            "memory": mock.patch.object(limits, "available", return_value=0),
            "permission": mock.patch("tokenyard.shm.processes.open_segment", no_descriptor),
            "addresses": mock.patch.object(stacks.segment, "find_place", no_descriptor),
        }
        try:
            if buffer.rank == 1:
                with patches[what]:
                    buffer.share_stack(own)
            else:
                buffer.share_stack(own)
        except tokenyard.SharedMemoryError as error:
            said = str(error)
        gc.collect()
        left = len(set(files_and_maps()) - before)
        return said, buffer.share_stack(own).node[:, 0].tolist(), left


LACKS = {
    "memory": "rank 1 failed: 8388608 bytes of shared memory are needed, 0 are available",
    "permission": "rank 1 failed: it cannot map the stack of rank 0: ",
    "addresses": "rank 1 failed: 16384 bytes of shared memory are needed: [Errno 13]",
}


@pytest.mark.parametrize("what", LACKS)
def test_if_one_rank_fails_all_raise(processes: Pools, what: str) -> None:
    for said, values, left in processes(2).run(lack, what):
        assert f"share stack: {LACKS[what]}" in said
        assert values == [0, 0, 1, 1]
        assert left == 0


@pytest.fixture
def alone() -> Iterator[tokenyard.Buffer]:
    from tokenyard.comm.loopback import LoopbackGroup, LoopbackWorld

    with tokenyard.Buffer(LoopbackGroup(LoopbackWorld(1), 0)) as buffer:
        yield buffer


def test_a_child_has_no_part_in_it(alone: tokenyard.Buffer) -> None:
    got = alone.share_stack(torch.ones(2, 1024))

    def look() -> None:
        assert not files_and_maps()
        with pytest.raises(RuntimeError, match="fork"):
            alone.share_stack(torch.ones(2))

    assert in_a_child(look) == 0
    assert in_a_child(partial(print, got.node)) == -signal.SIGSEGV
    assert in_a_child(partial(print, got.own)) == -signal.SIGSEGV
    assert got.node.sum() == 2048  # the parent goes on
