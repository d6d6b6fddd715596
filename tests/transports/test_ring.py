"""What rings add: memory that stays within its bound, however small that is."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.inside import little_is_much, transport_of
from tests.cases.processes import Pools
from tokenyard import Config, PeerLeft
from tokenyard.testing import Processes, assert_same, numbered_tokens, routing

pytestmark = pytest.mark.processes

EXPERTS = 12


@pytest.fixture
def ranks(processes: Pools) -> Processes:
    return processes(3)


def shared_bytes(buffer: tokenyard.Buffer) -> int:
    """Of all segments that this rank made for the Buffer."""
    memory = buffer.stats()["memory"]
    return sum(memory.values()) - memory["process"]


def there_and_back(
    buffer: tokenyard.Buffer, num_tokens: int, hidden: int, turn: int, **more: Any
) -> tuple[torch.Tensor, ...]:
    x = numbered_tokens(num_tokens, hidden, first=1000 * turn + 100 * buffer.rank)
    topk_idx, weights = routing("uniform", num_tokens, 4, EXPERTS, seed=turn + buffer.rank)
    got: Any = buffer.dispatch(
        x, topk_idx=topk_idx, topk_weights=weights, num_experts=EXPERTS, **more
    )
    back = buffer.combine(got.recv_x, got.handle, topk_weights=got.recv_topk_weights, **more)
    return got.recv_x, got.recv_topk_idx, got.handle.recv_src_idx, back.x, back.topk_weights


def same_as_direct(group: Any, num_bytes: int, num_sms: int, send: int, recv: int) -> int:
    config = Config(num_sms, send, recv)
    most = 0
    with (
        tokenyard.Buffer(group, num_bytes, transport="ring") as ring,
        tokenyard.Buffer(group, transport="direct") as direct,
    ):
        for turn in range(30):
            num_tokens, hidden = (0, 1, 7, 64, 200)[turn % 5], (8, 333, 64)[turn % 3]
            want = there_and_back(direct, num_tokens, hidden, turn)
            got = there_and_back(ring, num_tokens, hidden, turn, config=config)
            assert_same([*got], [*want], f"turn {turn}")
            most = max(most, shared_bytes(ring))
    return most


@pytest.mark.parametrize(
    "num_bytes, num_sms, send, recv",
    [(0, 20, 6, 256), (1 << 20, 20, 6, 256), (1 << 20, 4, 1, 2), (65536, 20, 3, 100)],
    ids=["default", "one-MiB", "two-slots", "tiny"],
)
def test_any_ring_gives_the_same_within_its_bound(
    ranks: Processes, num_bytes: int, num_sms: int, send: int, recv: int
) -> None:
    for held in ranks.run(same_as_direct, num_bytes, num_sms, send, recv):
        assert 0 < held <= (num_bytes or 16 << 20)


def too_small(group: Any) -> str:
    with tokenyard.Buffer(group, 65536, transport="ring") as buffer:
        with pytest.raises(ValueError, match="num_nvl_bytes") as caught:
            there_and_back(buffer, 8, 4096, 0)
        there_and_back(buffer, 8, 64, 0)  # shorter rows fit
        needed = int(str(caught.value).split("want at least ")[1].split()[0])
    with tokenyard.Buffer(group, needed, transport="ring") as buffer:
        there_and_back(buffer, 8, 4096, 0)
    return str(caught.value)


def test_a_ring_that_holds_no_row_says_what_it_needs(ranks: Processes) -> None:
    hint = Config(20).get_nvl_buffer_size_hint(2 * 4096, 3)
    for rank, text in enumerate(ranks.run(too_small)):
        assert text.startswith("dispatch: num_nvl_bytes is 65536, want at least ")
        assert text.endswith(
            f"for a row in each ring; get_nvl_buffer_size_hint says {hint}, on rank {rank}"
        )


def different_rings(group: Any) -> str:
    with pytest.raises(tokenyard.CallMismatch) as caught:
        tokenyard.Buffer(group, 65536 * (1 + group.rank()), transport="ring")
    return str(caught.value)


def test_ranks_agree_on_the_size_of_their_rings(ranks: Processes) -> None:
    for text in ranks.run(different_rings):
        assert "ring memory" in text


def threads(group: Any) -> None:
    """Several threads drive the channels of a large call."""
    with tokenyard.Buffer(group, transport="ring") as ring:
        torch.set_num_threads(1)
        want = there_and_back(ring, 600, 4096, 1)
        torch.set_num_threads(3)
        try:
            assert_same([*there_and_back(ring, 600, 4096, 1)], [*want])
        finally:
            torch.set_num_threads(1)


def test_threads_share_the_channels(ranks: Processes) -> None:
    ranks.run(threads)


def raise_in_a_part(group: Any) -> str:
    """One of the threads that drive the channels raises on rank 0; the others are in the midst."""
    with tokenyard.Buffer(group, transport="ring", timeout=scaled(60)) as ring:
        kernels, began = transport_of(ring)._kernels, time.monotonic()
        real, parts = kernels.ring_dispatch, itertools.count()

        def raising(*args: Any) -> int:
            if next(parts) == 0:
                raise MemoryError("of one thread")
            left: int = real(*args)
            return left

        if ring.rank == 0:
            kernels.ring_dispatch = raising
        try:
            with little_is_much(), pytest.raises((MemoryError, PeerLeft)) as caught:
                there_and_back(ring, 64, 8, 1)
        finally:
            kernels.ring_dispatch = real
        assert time.monotonic() - began < scaled(20)
        return type(caught.value).__name__


def test_a_thread_that_raises_ends_the_call_of_all(ranks: Processes) -> None:
    raised, *heard = ranks.run(raise_in_a_part)
    assert raised == "MemoryError"
    assert heard == ["PeerLeft"] * 2


def use_channels(group: Any) -> None:
    """Each call of its own config's, as many as the Buffer was opened with at most."""
    with tokenyard.Buffer(group, transport="ring") as ring:
        rings = transport_of(ring)._rings
        want = there_and_back(ring, 40, 64, 0)
        for num_sms, used in ((4, 2), (60, 10), (2, 1)):
            before = rings.lanes_RC.copy()
            got = there_and_back(ring, 40, 64, 0, config=Config(num_sms))
            x = numbered_tokens(40, 64)
            handle = ring.dispatch(x, **_routed(ring), config=Config(num_sms)).handle
            ring.dispatch(x, handle=handle, config=Config(num_sms))
            moved = (rings.lanes_RC[:, :, SENT] != before[:, :, SENT]).any(0)
            assert moved.tolist() == [place < used for place in range(10)]
            assert_same([*got], [*want], f"{num_sms} SMs")


SENT = 0  # the word of a lane that counts the records ever sent


def _routed(buffer: tokenyard.Buffer) -> dict[str, Any]:
    topk_idx, weights = routing("uniform", 40, 4, EXPERTS, seed=buffer.rank)
    return {"topk_idx": topk_idx, "topk_weights": weights, "num_experts": EXPERTS}


def test_a_call_takes_as_many_channels_as_its_config_says(ranks: Processes) -> None:
    ranks.run(use_channels)


def different_slots(group: Any) -> list[str]:
    """Ring of another length on each rank would lose rows."""
    mine = Config(20, 1, 2 + group.rank())
    texts = []
    with tokenyard.Buffer(group, transport="ring", timeout=scaled(60)) as ring:
        x = numbered_tokens(40, 64)
        same: Any = ring.dispatch(x, **_routed(ring))
        for call in (
            lambda: ring.dispatch(x, **_routed(ring), config=mine),
            lambda: ring.dispatch(x, handle=same.handle, config=mine),
            lambda: ring.combine(same.recv_x, same.handle, config=mine),
        ):
            with pytest.raises(tokenyard.CallMismatch) as caught:
                call()
            texts.append(str(caught.value))
        there_and_back(ring, 40, 64, 0)
    return texts


def test_ranks_agree_on_the_length_of_rings(ranks: Processes) -> None:
    for texts in ranks.run(different_slots):
        assert ["config.num_max_nvl_chunked_recv_tokens" in text for text in texts] == [True] * 3


def with_low_latency(group: Any) -> list[str]:
    """What both modes share stays within what was said of each."""
    hint = tokenyard.Buffer.get_low_latency_rdma_size_hint(16, 512, group.size(), EXPERTS)
    texts = []
    with tokenyard.Buffer(
        group, 1 << 20, hint, low_latency_mode=True, transport="ring", timeout=scaled(60)
    ) as buffer:
        topk_idx, weights = routing("uniform", 16, 4, EXPERTS, seed=buffer.rank)

        def low_latency(num_max: int, hidden: int, dtype: torch.dtype, zero_copy: bool) -> None:
            x = numbered_tokens(16, hidden, dtype=dtype)
            got: Any = buffer.low_latency_dispatch(x, topk_idx, num_max, EXPERTS, use_fp8=False)
            y = got.recv_x
            if zero_copy:
                y = buffer.get_next_low_latency_combine_buffer(got.handle).copy_(got.recv_x)
            buffer.low_latency_combine(y, topk_idx, weights, got.handle, zero_copy=zero_copy)

        for turn in range(6):
            low_latency(16, 512, torch.bfloat16, turn % 2 == 0)
            there_and_back(buffer, 40, 64, turn)
            assert shared_bytes(buffer) <= (1 << 20) + hint
        for sizes in (
            (64, 512, torch.bfloat16),
            (16, 1024, torch.bfloat16),
            (16, 512, torch.float),
        ):
            with pytest.raises(ValueError, match="num_rdma_bytes") as caught:
                low_latency(*sizes, False)
            texts.append(str(caught.value))
        low_latency(16, 512, torch.bfloat16, False)
        assert shared_bytes(buffer) <= (1 << 20) + hint
    return texts


def test_the_low_latency_mode_has_a_bound_of_its_own(ranks: Processes) -> None:
    hints = [
        tokenyard.Buffer.get_low_latency_rdma_size_hint(num_max, hidden, 3, EXPERTS)
        for num_max, hidden in ((16, 512), (64, 512), (16, 1024))
    ]
    for rank, texts in enumerate(ranks.run(with_low_latency)):
        for text, needed in zip(texts, hints[1:]):
            assert text == (
                f"low-latency dispatch: num_rdma_bytes is {hints[0]}, want at least {needed}, as "
                f"get_low_latency_rdma_size_hint says, or 0 for no bound, on rank {rank}"
            )
        assert len(texts) == 3
