"""The allocator: what is lent, what comes back, what lies idle, and what goes to the system."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from tokenyard.errors import SharedMemoryError
from tokenyard.runtime import limits, memory
from tokenyard.runtime import pool as pools
from tokenyard.runtime.memory import LocalRegion
from tokenyard.runtime.pool import Pool, size_class
from tokenyard.shm import segment
from tokenyard.shm.pool import SegmentPool

MIB = 1 << 20


@pytest.fixture(params=["local", "shared"])
def pool(request: pytest.FixtureRequest) -> Any:
    made: Pool[Any]
    if request.param == "local":
        made = Pool(LocalRegion)
    elif why := segment.why_not():
        pytest.skip(why)
    else:
        made = SegmentPool()
    yield made
    made.close()


@pytest.mark.timeout(10)
def test_a_tensor_may_die_while_its_own_thread_holds_the_pool(pool: Pool[Any]) -> None:
    """As when the collector of cycles runs inside take: it must not wait for itself."""
    region, array = pool.take(1000)
    with pool._lock:
        del array
    assert pool.take(1000)[0] is region


@pytest.mark.timeout(10)
def test_a_tensor_may_die_while_another_thread_holds_the_pool(pool: Pool[Any]) -> None:
    """Its death waits for nobody. What it leaves is found by whoever comes next."""
    region, array = pool.take(1000)
    held = [array]
    del array
    with pool._lock:
        dying = threading.Thread(target=held.clear)
        dying.start()
        dying.join()
    assert (pool.in_use, pool.idle) == (0, region.size)
    assert pool.take(1000)[0] is region


def test_a_region_is_lent_again_only_when_all_its_tensors_are_dead(pool: Pool[Any]) -> None:
    first, array = pool.take(100_000)
    column = torch.from_numpy(array[:1000].view(np.int64))
    view = column[3:5].view(torch.float64)
    del array, column
    second, kept = pool.take(100_000)
    assert second is not first
    del view
    assert pool.take(90_000)[0] is first  # a little less fits too
    assert len(list(pool)) == 2
    assert kept.size == second.size
    assert pool.find(first.address + 5, 10) is first
    assert pool.find(first.address - 5, 10) is None


def test_small_regions_are_lent_again_when_nobody_holds_them(pool: Pool[Any]) -> None:
    first, array = pool.take_small(1000)
    view = torch.from_numpy(array[:1000].view(np.int64))[3:5]
    del array
    assert pool.in_use == first.size  # asked for, so the pool holds on to it no longer
    second, array = pool.take_small(1000)
    assert second is not first
    del array
    again, array = pool.take_small(2000)
    assert again is second
    del view
    assert pool.take_small(1000)[0] is first  # which has come back as any other
    del array
    pool.trim()
    assert (pool.in_use, pool.idle) == (0, 0)


def test_small_regions_are_not_lent_for_much_more_or_less(pool: Pool[Any]) -> None:
    large = pool.take_small(300_000)[0]
    assert pool.take_small(400_000)[0] is not large
    assert pool.take_small(1000)[0] is not large
    assert pool.take_small(200_000)[0] is large


def test_small_takes_let_a_large_region_go_as_others_do(pool: Pool[Any]) -> None:
    pool.take(64 * MIB)
    for _ in range(3 * pools._WINDOW):
        pool.take_small(1000)
    assert sum(region.size for region in pool) < 2 * MIB


def test_regions_begin_on_a_cache_line(pool: Pool[Any]) -> None:
    held = [pool.take(number)[0] for number in (1, 70_001, 5 * MIB + 3)]
    assert [region.address % 64 for region in held] == [0, 0, 0]


def test_what_lies_idle_follows_what_was_in_use_of_late(pool: Pool[Any]) -> None:
    """Results of 4 MiB, eight at once, and then one after the other for two windows."""
    held = [pool.take(4 * MIB)[1] for _ in range(8)]
    held.clear()
    for _ in range(8):
        assert pool.find(pool.take(4 * MIB)[0].address, 4 * MIB)
    assert pool.idle == 32 * MIB
    for _ in range(2 * pools._WINDOW):
        pool.take(MIB)
    assert pool.in_use == 0
    assert pool.idle <= MIB * 7 // 4


@pytest.mark.parametrize("kind", ["take", "take_small", "take_idle"])
def test_a_large_region_goes_after_two_windows_of_calls(pool: Pool[Any], kind: str) -> None:
    """However quickly they come, and whenever in a window it was taken."""
    for number in (1, 100, pools._WINDOW - 1, pools._WINDOW, pools._WINDOW + 1):
        for _ in range(number):
            pool.take(MIB)
        large = pool.take(64 * MIB)[0]
        for _ in range(2 * pools._WINDOW):
            pool.take_idle(1000, 1000) if kind == "take_idle" else getattr(pool, kind)(1000)
        assert pool.find(large.address, 1) is None
        pool._gone_at = -60.0  # a minute later


def test_what_is_needed_again_and_again_stays_for_seconds(
    pool: Pool[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts of a server, each after hundreds of small calls within a second."""
    seconds, made = [1000.0], list[int]()
    monkeypatch.setattr(pools.time, "monotonic", lambda: seconds[0])
    make = pool._make

    def counted(size: int) -> Any:
        made.append(size)
        return make(size)

    pool._make = counted

    def steps(number: int, large: int = 64 * MIB) -> list[int]:
        """Large memory that was made anew in so many seconds, in each of which it is needed."""
        made.clear()
        for _ in range(number):
            seconds[0] += 1
            pool.take(large)
            for _ in range(4 * pools._WINDOW):
                pool.take(100_000)
        return [size for size in made if size > MIB]

    assert len(steps(20)) == 2  # the second time it is known to come again
    assert len(steps(20, 40 * MIB)) <= 1
    for _ in range(12):  # seconds in which nothing large is needed
        seconds[0] += 1
        for _ in range(4 * pools._WINDOW):
            pool.take(100_000)
    assert sum(region.size for region in pool) < 2 * MIB
    seconds[0] += 60
    assert len(steps(1)) == 1
    assert sum(region.size for region in pool) < 2 * MIB  # the only one of its kind again


def test_trim_drops_the_longest_idle_first(pool: Pool[Any]) -> None:
    dropped: list[Any] = []
    pool._on_drop = dropped.append
    taken = [pool.take(MIB) for _ in range(4)]
    regions = [region for region, _ in taken]
    order = [2, 0, 3]
    for number in order:
        taken[number] = (regions[number], None)
    pool.trim(MIB)
    assert dropped == [regions[2], regions[0]]
    pool.trim()
    assert dropped == [regions[2], regions[0], regions[3]]
    assert list(pool) == [regions[1]]
    assert (pool.in_use, pool.idle) == (MIB, 0)


def test_a_closed_pool_keeps_nothing(pool: Pool[Any]) -> None:
    """Without the collector: what is lent goes with its array, all else at once."""
    gc.disable()
    try:
        region, array = pool.take(1000)
        idle, _ = pool.take(1000)
        del _
        lives, idles = weakref.ref(region), weakref.ref(idle)
        pool.close()
        del region, idle
        assert idles() is None
        array[:] = 1
        del array
        assert lives() is None
        assert (pool.in_use, pool.idle, list(pool)) == (0, 0, [])
    finally:
        gc.enable()


class Scarce:
    """A system with so many bytes for regions of all pools."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def make(self, num_bytes: int) -> LocalRegion:
        if num_bytes > self.left:
            raise limits.NoMemory(f"{num_bytes} bytes of memory are needed, {self.left} are left")
        self.left -= num_bytes
        region = LocalRegion(num_bytes)
        weakref.finalize(region, self.back, num_bytes)
        return region

    def back(self, num_bytes: int) -> None:
        self.left += num_bytes


def test_idle_memory_of_all_pools_is_given_back_before_one_fails() -> None:
    system = Scarce(4 * MIB)
    first, second = (Pool(system.make, spare=64 * MIB) for _ in range(2))
    first.take(3 * MIB)
    assert first.idle == 3 * MIB
    held = second.take(3 * MIB)[1]
    assert first.idle == 0
    with pytest.raises(limits.NoMemory, match=r"still held take \d+ bytes"):
        first.take(2 * MIB)
    assert (first.in_use, second.in_use) == (0, 3 * MIB)
    del held
    first.take(2 * MIB)


def test_a_request_that_failed_leaves_the_bound_as_it_was() -> None:
    pool = Pool(Scarce(4 * MIB).make)
    with pytest.raises(MemoryError):
        pool.take(1 << 40)
    pool.take(2 * MIB)
    pool.take(100_000)
    assert pool.idle <= 2 * MIB * 7 // 4


def test_shared_memory_that_cannot_be_had_says_what_is_held() -> None:
    if why := segment.why_not():
        pytest.skip(why)
    pool = SegmentPool()
    _, held = pool.take(MIB)
    with pytest.raises(SharedMemoryError, match=r"bytes of shared memory.*still held take \d+"):
        pool.take(1 << 45)
    assert held.size == MIB
    pool.close()


def test_sizes_fall_into_classes() -> None:
    for num_bytes in (1, 65_536, 65_537, 1_000_000, 12_345_678, 1 << 33):
        wanted = size_class(num_bytes)
        assert num_bytes <= wanted <= max(1 << 16, num_bytes * 9 // 8)
        assert size_class(wanted) == wanted
        assert wanted % 4096 == 0


def test_pools_that_are_gone_are_not_trimmed() -> None:
    made = Pool(LocalRegion)
    key = id(made)
    made.take(1000)
    assert key in pools._pools
    del made
    gc.collect()
    assert key not in pools._pools
    memory.trim()


def test_two_threads_are_never_lent_one_region(pool: Pool[Any]) -> None:
    """The switch from thread to thread may come between any two steps of `take_small`."""
    hits: list[int] = []
    held, counts = [0, 0], [0, 0]

    def work(me: int) -> None:
        for _ in range(20_000):
            region, array = pool.take_small(100)
            held[me] = id(region)
            if held[1 - me] == id(region):
                hits.append(me)
            held[me] = 0
            del region, array
            counts[me] += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(me,)) for me in (0, 1)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        sys.setswitchinterval(before)
    assert (hits, counts) == ([], [20_000, 20_000])


def test_a_region_that_is_lent_meanwhile_is_not_lent_again(pool: Pool[Any]) -> None:
    """Another thread takes from the shelf between this one's look at a region and its hold."""
    del [pool.take_small(100)[1]][:]
    others: list[Any] = []
    look: Any = pools._num_holders

    def interrupted(one: Any) -> int:
        pools._num_holders = look
        others.append(pool.take_small(100))
        return look(one)

    pools._num_holders = interrupted  # type: ignore[assignment]
    try:
        region, array = pool.take_small(100)
    finally:
        pools._num_holders = look
    assert others[0][0] is not region
    del array


def test_idle_memory_is_lent_however_large(pool: Pool[Any]) -> None:
    assert pool.take_idle(100, 1) is None
    region, array = pool.take(8 * MIB)
    assert pool.take_idle(100, 1) is None
    del array
    found = pool.take_idle(100, 1)
    assert found is not None
    assert found[0] is region
    assert pool.take_idle(100, 1) is None
    assert pool.in_use == size_class(1)
    del found
    assert pool.in_use == 0


@pytest.mark.parametrize("is_needed", [False, True])
def test_memory_that_is_only_lent_for_less_goes(is_needed: bool, pool: Pool[Any]) -> None:
    _region, array = pool.take(8 * MIB)
    del array
    for turn in range(600):
        found = pool.take_idle(100, 1)
        if found is None:
            break
        if is_needed and turn % 50 == 0:
            pool.needed(8 * MIB)
        del found
    assert (turn < 300) == (not is_needed)
