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

ROWS = memory.LARGE // 1024  # of 512 bfloat16 elements


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_kept", {})


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
    first = large()
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


def test_small_results_do_not_take_large_blocks() -> None:
    large(4 * ROWS)
    (kept,) = memory._kept.values()
    got = large()
    assert list(memory._kept.values()) == [kept]
    assert not kept.ctypes.data <= got.data_ptr() < kept.ctypes.data + kept.size


def test_the_smallest_that_fits_is_taken() -> None:
    sizes = [ROWS * 7 // 4, ROWS * 5 // 4, ROWS * 6 // 4]
    results = [large(rows) for rows in sizes]
    middle = results[1].data_ptr()
    results.clear()
    assert large().data_ptr() == middle


def test_kept_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_KEPT", 3 * memory.LARGE)
    results = [large() for _ in range(4)]
    places = [result.data_ptr() for result in results]
    while results:
        del results[0]
    assert len(memory._kept) == 2  # a block is a little more than LARGE
    large(5 * ROWS)
    assert [large().data_ptr(), large().data_ptr()] == places[2:]  # the oldest went


def test_results_may_die_in_cycles_and_on_any_thread() -> None:
    """Each thread fills its own results and finds them as it left them."""
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(40):
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
    assert memory._kept
