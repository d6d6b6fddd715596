"""Config and channels: the values that users hand in."""

from __future__ import annotations

import pytest

from tokenyard import Config
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
