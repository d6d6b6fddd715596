"""What rings add: memory that stays within its bound, however small that is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenyard
from tokenyard import Config
from tokenyard.testing import Processes, assert_same, numbered_tokens, routing

pytestmark = pytest.mark.processes

EXPERTS = 12


@pytest.fixture(scope="module")
def ranks():
    with Processes(3, timeout=100) as processes:
        yield processes


def shared_bytes(buffer: tokenyard.Buffer) -> int:
    """Of all segments that this rank made for the Buffer."""
    team = buffer._engine.transport._team
    return sum(segment.size for segment in [*team._kept, *team.pool])


def there_and_back(buffer: tokenyard.Buffer, num_tokens: int, hidden: int, turn: int, **more: Any):
    x = numbered_tokens(num_tokens, hidden, first=1000 * turn + 100 * buffer.rank)
    topk_idx, weights = routing("uniform", num_tokens, 4, EXPERTS, seed=turn + buffer.rank)
    got = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=EXPERTS, **more)
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
