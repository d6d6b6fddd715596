"""The small parts: configs, events, topology, the kit's own tools."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tokenyard import Config, EventHandle, EventOverlap
from tokenyard.testing import (
    ROUTINGS,
    assert_same,
    layout_of,
    numbered_tokens,
    poisoned,
    routing,
    run_virtual,
)
from tokenyard.topology import Placement, Topology
from tokenyard.types import split_range


def test_config_has_deepep_defaults() -> None:
    config = Config()
    assert (config.num_sms, config.num_channels) == (20, 10)
    assert config.num_max_nvl_chunked_send_tokens == 6
    assert config.num_max_nvl_chunked_recv_tokens == 256
    assert Config(24, 8, 128) == Config(24, 8, 128, 6, 256)


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_size_hint_has_room_for_a_ring_per_channel_and_source(num_ranks: int) -> None:
    config = Config(4, 6, 16)
    hint = config.get_nvl_buffer_size_hint(1000, num_ranks)
    assert hint % 128 == 0
    assert hint >= 2 * num_ranks * 16 * (1000 + 8 * 8 + 8 * 4 + 4)
    assert config.get_rdma_buffer_size_hint(1000, num_ranks) == 0


def test_channels_cover_all_tokens_once() -> None:
    for num_tokens in (0, 1, 7, 64, 65):
        for num_channels in (1, 3, 10, 100):
            ranges = split_range(num_tokens, num_channels)
            assert len(ranges) == num_channels
            assert [t for begin, end in ranges for t in range(begin, end)] == [*range(num_tokens)]


def test_event_of_a_synchronous_call_holds_nothing() -> None:
    with pytest.raises(ValueError, match="there is no event to wait for: the call was not made"):
        EventOverlap().current_stream_wait()
    with EventOverlap():
        pass


def test_event_waits_at_the_end_of_a_block() -> None:
    class Watched(EventHandle):
        waits = 0

        def current_stream_wait(self) -> None:
            self.waits += 1

    event = Watched()
    with EventOverlap(event):
        assert event.waits == 0
    assert event.waits == 1


def test_captured_event_is_over() -> None:
    tokenyard.Buffer.capture().current_stream_wait()


def test_topology() -> None:
    assert Topology.even(6, 4).node_of_rank == (0, 0, 0, 0, 1, 1)
    interleaved = Topology.from_marks([9, 9, 4, 9, 4])
    assert interleaved.node_of_rank == (0, 0, 1, 0, 1)
    assert (interleaved.num_ranks, interleaved.num_nodes) == (5, 2)


def test_placement_numbers_a_ranks_experts_from_0() -> None:
    placement = Placement(torch.tensor([2, 0, 2, 2, 0], dtype=torch.int32), 4)
    assert placement.experts_of_rank == [[1, 4], [], [0, 2, 3], []]
    assert placement.local_of_expert.tolist() == [0, 0, 1, 2, 1]
    assert placement.local_table(2).tolist() == [0, -1, 1, 2, -1]
    assert placement.local_table(1).tolist() == [-1] * 5
    assert placement.padded_experts_RL.tolist() == [[1, 4, 5], [5, 5, 5], [0, 2, 3], [5, 5, 5]]


def buffer_words(group) -> tuple[str, str]:
    with tokenyard.Buffer(group, ranks_per_node=2) as buffer:
        open_words = repr(buffer)
        assert (buffer.rank, buffer.group_size) == (group.rank(), 3)
    buffer.destroy()  # after close: nothing
    return open_words, repr(buffer)


def test_buffer_says_what_it_is() -> None:
    words = run_virtual(buffer_words, 3).results[1]
    where = "<tokenyard.Buffer rank 1 of 3"
    assert words == (
        f"{where} on 2 nodes, collective over loopback>",
        f"{where}, the Buffer is closed>",
    )


def test_automatic_choices_are_logged_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tokenyard"):
        run_virtual(buffer_words, 3)
    said = "transport: collective over loopback, since virtual ranks are threads, whose bytes are"
    assert f"{said} counted" in caplog.messages


def test_num_sms_is_the_default_of_all_buffers() -> None:
    before = tokenyard.Buffer.num_sms
    try:
        tokenyard.Buffer.set_num_sms(8)
        assert tokenyard.Buffer.get_dispatch_config(5).num_channels == 4
        assert tokenyard.Buffer.get_combine_config(5).num_sms == 8
    finally:
        tokenyard.Buffer.num_sms = before


@pytest.mark.parametrize(
    "got, want, text",
    [
        (torch.zeros(2), torch.zeros(1), r"shape \[2\], want \[1\]"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype torch.float32, want"),
        (torch.tensor([0.0, -0.0]), torch.zeros(2), r"value\[1\] is -0.0, want 0.0 \(1 of 2"),
        (torch.tensor([float("nan")]), torch.zeros(1), r"value\[0\] is nan, want 0.0"),
        ([1, 2], [1, 3], r"value\[1\] is 2, want 3"),
        ([1], [1, 3], "value has length 1, want 2"),
        (None, torch.zeros(1), "value is None, want a tensor"),
        (3, [3], "value is 3, want a sequence"),
    ],
)
def test_assert_same_sees_every_difference(got: object, want: object, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        assert_same(got, want)


def test_assert_same_accepts_equal_bits() -> None:
    values = torch.tensor([1.5, -0.0, float("inf"), float("nan")])
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn):
        assert_same(values.to(dtype), values.to(dtype))
    assert_same([torch.tensor([True]), 3, None], [torch.tensor([True]), 3, None])


def test_poison_fills_what_nobody_wrote() -> None:
    from tokenyard.runtime import memory

    with poisoned():
        assert memory.empty(3, 2, dtype=torch.bfloat16).isnan().all()
        assert memory.empty(3, 8).view(torch.float32).isnan().all()
        assert memory.empty_array(4, "int32").tolist() == [-(2**31)] * 4
    assert memory.empty_array.__module__ == "numpy"


@pytest.mark.parametrize("kind", ROUTINGS)
def test_routings_choose_distinct_experts(kind: str) -> None:
    topk_idx, weights = routing(kind, 200, 4, 16, seed=3)
    assert (topk_idx.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert topk_idx.shape == weights.shape == (200, 4)
    assert (topk_idx.min() >= -1) & (topk_idx.max() < 16)
    for row in topk_idx.tolist():
        chosen = [e for e in row if e != -1]
        assert len(chosen) == len(set(chosen))
    assert_same(routing(kind, 200, 4, 16, seed=3), (topk_idx, weights))


def test_routings_have_their_tempers() -> None:
    def share(kind: str) -> torch.Tensor:
        """Of the choices: how many are expert 0, how many nobody."""
        topk_idx, _ = routing(kind, 2000, 2, 16)
        return torch.stack([(topk_idx == 0).float().mean(), (topk_idx == -1).float().mean()])

    assert_same(share("one"), torch.tensor([0.5, 0.5]))
    assert_same(share("none"), torch.tensor([0.0, 1.0]))
    assert 0.05 < share("uniform")[0] < 0.075  # 1 in 16
    assert share("skewed")[0] > 0.2
    assert 0.3 < share("holes")[1] < 0.37
    with pytest.raises(ValueError, match="routing is 'fair', want one of uniform, skewed"):
        routing("fair", 1, 1, 1)


def test_numbered_tokens_know_who_they_are() -> None:
    all_of_them = numbered_tokens(100, 8, dtype=torch.float64)
    assert_same(numbered_tokens(30, 8, first=70, dtype=torch.float64), all_of_them[70:])
    assert len({tuple(row) for row in all_of_them.tolist()}) == 100


def test_layout_of_needs_no_group() -> None:
    got = layout_of(torch.tensor([[0, 3], [-1, 2]]), num_experts=4, num_ranks=2)
    assert got.is_token_in_rank.tolist() == [[True, True], [False, True]]
    assert got.num_tokens_per_rank.tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"topk_idx\[0, 1\] is 4, want -1..3 \(num_experts=4\)"):
        layout_of(torch.tensor([[0, 4]]), num_experts=4, num_ranks=2)
    with pytest.raises(ValueError, match="num_ranks is 0, want at least 1"):
        layout_of(torch.tensor([[0, 3]]), num_experts=4, num_ranks=0)


def test_a_table_has_one_address_whichever_thread_asks_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call on the user's thread and one on the Buffer's may both be the first to need it."""
    placement, where = Placement.even(4, 2), torch.where
    meeting = threading.Barrier(2, timeout=20)

    def slow(*args: Any) -> Tensor:
        made = where(*args)
        meeting.wait()
        return made

    monkeypatch.setattr(torch, "where", slow)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(placement.local_table, [0, 0])
    monkeypatch.undo()
    assert one is other
    assert one is placement.local_table(0)
