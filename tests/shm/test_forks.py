"""What a forked child has of the shared memory of its parent: nothing."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.shared_memory import files_and_maps, in_a_child
from tokenyard.comm.loopback import LoopbackGroup, LoopbackWorld

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no shared memory")


def opened() -> tokenyard.Buffer:
    return tokenyard.Buffer(LoopbackGroup(LoopbackWorld(1), 0), transport="direct")


def received(buffer: tokenyard.Buffer) -> Any:
    ids = torch.zeros(4, 1, dtype=torch.int64)
    x, weights = torch.ones(4, 8), torch.ones(4, 1)
    return buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_experts=1)


def test_a_child_keeps_nothing_and_reads_no_later_rows() -> None:
    with opened() as buffer:
        rows = received(buffer).recv_x
        assert files_and_maps()

        def look() -> None:
            assert not files_and_maps()
            with pytest.raises(RuntimeError, match="process"):
                received(buffer)
            buffer.close()  # does nothing

        assert in_a_child(look) == 0
        assert in_a_child(lambda: print(rows[0, 0])) == -signal.SIGSEGV
        assert received(buffer).recv_x.sum() == 32  # the parent goes on


def test_a_child_may_let_go_of_what_it_inherited_and_share_its_own() -> None:
    buffer = opened()
    held = [received(buffer)]

    def let_go() -> None:
        held.clear()
        with opened() as own:
            assert received(own).recv_x.sum() == 32
            assert files_and_maps()

    assert in_a_child(let_go) == 0
    buffer.close()
