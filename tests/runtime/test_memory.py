"""Memory of large results: used again once they have died, and never before."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenyard.runtime import memory
from tokenyard.runtime.pool import Pool
from tokenyard.testing import poisoned

ROWS = memory.LARGE // 1024  # of 512 bfloat16 elements


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool[memory.LocalRegion]:
    """A pool of the test's own, which has lent nothing yet."""
    fresh = Pool(memory.LocalRegion, spare=64 * memory.LARGE)
    monkeypatch.setattr(memory, "_local", fresh)
    return fresh


def large(rows: int = ROWS) -> Tensor:
    return memory.empty(rows, 512, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (0, 7), (ROWS, 1031)], ids=str)
def test_is_what_was_asked_for(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    got = memory.empty(*shape, dtype=dtype)
    assert (got.shape, got.dtype, got.device) == (shape, dtype, torch.device("cpu"))
    assert got.is_contiguous()
    assert got.data_ptr() % 64 == 0
    assert memory.empty(*shape, dtype=dtype, device="meta").is_meta


def test_the_dead_leave_their_memory() -> None:
    first = large(ROWS + 1)
    place = first.data_ptr()
    del first
    assert large(ROWS + 7).data_ptr() == place


@pytest.mark.parametrize(
    "hold",
    [lambda x: x[5:6, 3], lambda x: x.view(torch.int16).numpy(), Tensor.untyped_storage],
    ids=["view", "numpy", "storage"],
)
def test_what_is_held_is_never_given_out(hold: Callable[[Tensor], Any]) -> None:
    first = large()
    place, held = first.data_ptr(), hold(first)
    del first
    second = large()
    assert second.data_ptr() != place
    del held
    assert large().data_ptr() == place


def test_small_results_do_not_take_large_regions(pool: Pool[memory.LocalRegion]) -> None:
    large(4 * ROWS)
    (idle,) = pool
    got = large()
    assert pool.idle == idle.size
    assert not idle.address <= got.data_ptr() < idle.address + idle.size


def test_the_smallest_that_fits_is_taken() -> None:
    sizes = [ROWS * 11 // 8, ROWS * 9 // 8, ROWS * 10 // 8]
    results = [large(rows) for rows in sizes]
    middle = results[1].data_ptr()
    results.clear()
    assert large().data_ptr() == middle


def test_idle_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(memory.LocalRegion, most_idle=3 * memory.LARGE)
    monkeypatch.setattr(memory, "_local", pool)
    results = [large() for _ in range(4)]
    places = [result.data_ptr() for result in results]
    while results:
        del results[0]
    assert pool.idle == 3 * memory.LARGE
    got = [large(), large(), large()]
    assert [one.data_ptr() for one in got] == places[1:]  # the oldest went


def test_trim_gives_idle_memory_back(pool: Pool[memory.LocalRegion]) -> None:
    held, _ = large(), large()
    del _
    assert (pool.in_use, pool.idle) == (memory.LARGE, memory.LARGE)
    memory.trim()
    assert (pool.in_use, pool.idle) == (memory.LARGE, 0)
    assert [region.address for region in pool] == [held.data_ptr()]


def test_memory_that_is_used_again_is_poisoned_too() -> None:
    memory.take_bytes(1000)[:] = 7
    with poisoned():
        assert (memory.take_bytes(1000) == 0xFF).all()


def test_results_may_die_in_cycles_and_on_any_thread(pool: Pool[memory.LocalRegion]) -> None:
    """Each thread fills its own results and finds them as it left them."""
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(15):
            got = large()
            got.fill_(number)
            cycle: list[Any] = [got]
            cycle.append(cycle)
            if turn % 7 == 0:
                gc.collect()
            if not (got == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong
    assert pool.in_use == 0
    assert pool.idle == sum(region.size for region in pool) > 0
