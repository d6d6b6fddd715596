"""Pages of memory: who has them first, and how large they are (docs/internals/numa.md)."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from benchmarks.huge_pages import measure
from tokenyard.runtime import memory
from tokenyard.shm import segment
from tokenyard.shm.processes import within
from tokenyard.shm.segment import Segment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has segments")
MUCH = 16 << 20
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def noted(address: int, what: str) -> list[str]:
    """What the system notes under this name of the mapping at an address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= address < int(found[2], 16)
        elif here and line.startswith(f"{what}:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:x}")


def huge_bytes(address: int) -> int:
    return int(noted(address, "ShmemPmdMapped")[0]) << 10


def grants_huge_pages() -> bool:
    """Whether the system gives a memory file huge pages that it is asked for."""
    try:
        return measure(MUCH, collapse=True)[1] == MUCH
    except OSError:
        return False


def test_the_owner_of_a_segment_has_all_its_pages_before_a_peer_hears_of_it() -> None:
    """A page lies on the memory node of whoever touches it first."""
    one = segment.Segment(MUCH)
    try:
        assert os.fstat(one.fd).st_blocks * 512 >= MUCH
    finally:
        one.close()


@pytest.mark.skipif(
    not HUGE.exists() or "[never]" in HUGE.read_text(), reason="the system gives no huge pages"
)
def test_large_results_of_this_process_ask_for_huge_pages() -> None:
    lent = memory.take_bytes(MUCH)
    assert "hg" in noted(lent.ctypes.data + MUCH // 2, "VmFlags")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Huge pages may take as long as they want."""
    monkeypatch.setattr(segment, "_HUGE_SECONDS", 1e9)
    monkeypatch.setattr(segment, "_no_asking_before", 0.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("more", [0, 5000], ids=["whole", "with-a-rest"])
def test_segments_have_huge_pages_where_the_system_grants_them(more: int) -> None:
    """For their owner, and for a peer that maps them. While others use its memory, a system may
    refuse one segment what it grants the next.
    """
    want = MUCH if grants_huge_pages() else 0
    for _ in range(5):
        one = segment.Segment(MUCH + more)
        try:
            peers = segment.attach(os.getpid(), *one.told, within(1))
            found = huge_bytes(one.address), huge_bytes(peers.ctypes.data)
            one.array()[:] = 7
            assert len(peers) == MUCH + more
            assert (peers == 7).all()
        finally:
            one.close()
        if found == (want, want):
            break
    assert found == (want, want)


@pytest.mark.usefixtures("patient")
def test_nobody_waits_for_huge_pages_that_are_slow_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a slow one a process asks for no more, for a hundred times as long as that took."""
    asked: list[tuple[int, int]] = []
    now = [50.0]

    class System:
        mmap, munmap = segment.system().mmap, segment.system().munmap

        def madvise(self, place: int, num_bytes: int, _: int) -> int:
            asked.append((place, num_bytes))
            now[0] += 0.010
            return 0

    monkeypatch.setattr(segment, "_HUGE_SECONDS", 0.003)
    monkeypatch.setattr(segment.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(segment, "system", System)
    huge, counts = segment.huge_page(), []
    for seconds in (0.0, 0.5, 0.5):
        now[0] += seconds
        asked.clear()
        one = segment.Segment(MUCH)
        counts.append(len(asked))
        assert asked in ([], [(one.address, huge)])
        one.close()
    assert counts == ([1, 0, 1] if huge else [0, 0, 0])


def test_mappings_of_segments_leave_no_addresses_behind() -> None:
    def num_mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    segment.Segment(MUCH).close()
    before = num_mappings()
    for more in range(8):
        one = segment.Segment(MUCH + more * 300_000)
        segment.attach(os.getpid(), *one.told, within(1))
        one.close()
        del one
    assert num_mappings() <= before + 2  # of the allocator


@pytest.mark.parametrize("more", [-4096, 4096], ids=["less", "more"])
def test_a_segment_of_another_size_than_told_is_not_mapped(more: int) -> None:
    one = segment.Segment(1 << 16)
    fd, num_bytes, identity = one.told
    try:
        with pytest.raises(segment.Gone, match="not as large as was told"):
            segment.attach(os.getpid(), fd, num_bytes + more, identity, within(1))
    finally:
        one.close()


def test_ctrl_c_while_memory_is_reserved_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Segment(1 << 20)
    assert os.listdir("/proc/self/fd") == before
