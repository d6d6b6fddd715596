"""What a Buffer says of itself, and its defaults."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import tokenyard
from tokenyard.testing import run_virtual


def buffer_words(group: Any) -> tuple[str, str]:
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


def sets_num_sms(group: Any) -> list[int]:
    """How many channels a Buffer takes where another one is open, by default."""
    with tokenyard.Buffer(group) as before:
        tokenyard.Buffer.set_num_sms(8)
        with tokenyard.Buffer(group) as after:
            return [one._config.num_channels for one in (before, after)]


def test_num_sms_is_the_default_of_buffers_that_open() -> None:
    before = tokenyard.Buffer.num_sms
    try:
        tokenyard.Buffer.set_num_sms(8)
        assert tokenyard.Buffer.get_dispatch_config(5).num_channels == 4
        assert tokenyard.Buffer.get_combine_config(5).num_sms == 8
        tokenyard.Buffer.set_num_sms(before)
        assert run_virtual(sets_num_sms, 1).results == [[10, 4]]
    finally:
        tokenyard.Buffer.num_sms = before


def test_a_placement_is_the_buffers_own() -> None:
    def job(group: Any) -> list[int]:
        placement = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
        with tokenyard.Buffer(group, placement=placement) as buffer:
            placement.fill_(1)
            return buffer.get_local_experts(4)

    assert run_virtual(job, 2).results == [[0, 1], [2, 3]]


def test_a_handle_by_position_says_what_goes_by_keyword() -> None:
    def job(group: Any) -> None:
        buffer: Any
        with (
            tokenyard.Buffer(group) as buffer,
            pytest.raises(ValueError, match=r"handle is a Tensor.* topk_idx=.* by keyword"),
        ):
            buffer.dispatch(torch.ones(2, 8), torch.zeros(2, 1).long(), torch.ones(2, 1), 16)

    run_virtual(job, 1)
