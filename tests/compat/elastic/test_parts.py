"""Engram, pipeline and all-gather sessions of ElasticBuffer: as `spec` says, and named errors."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.elastic_parts import FP8, die, fetch, pipe, sessions
from tests.cases.processes import Pools
from tokenyard.testing import Exited, Processes, run_virtual

TRANSPORTS = pytest.mark.parametrize("transport", ["collective", "direct", "ring"])
ON_VIRTUAL = pytest.mark.parametrize("num_ranks", [2, 3, 8])


@TRANSPORTS
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, torch.float32])
def test_fetch(dtype: torch.dtype, num_ranks: int, transport: str) -> None:
    run_virtual(fetch, num_ranks, transport, dtype)


@TRANSPORTS
@ON_VIRTUAL
@pytest.mark.parametrize("num_slots", [2, 4])
def test_neighbours(num_slots: int, num_ranks: int, transport: str) -> None:
    run_virtual(pipe, num_ranks, transport, num_slots, num_ranks)


@TRANSPORTS
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_sessions(num_ranks: int, transport: str) -> None:
    run_virtual(sessions, num_ranks, transport)


@pytest.mark.processes
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("transport", ["auto", "ring", "collective", "hierarchical"])
def test_processes(transport: str, num_ranks: int, processes: Pools) -> None:
    pool = processes(num_ranks)
    pool.run(fetch, transport, torch.bfloat16)
    pool.run(fetch, transport, FP8)
    pool.run(pipe, transport, 3, 7)
    pool.run(sessions, transport)


def test_sizes_are_those_of_deepep() -> None:
    hints = tokenyard.ElasticBuffer
    two = 2 << 20
    assert hints.get_engram_storage_size_hint(524288, 128, 512 * 24) == (3145728 + 1048576, 1 << 27)
    assert hints.get_engram_storage_size_hint(1, 1, 1, torch.float8_e4m3fn) == (two, two)
    assert hints.get_pp_buffer_size_hint(1 << 20, 4) == 16 << 20
    assert hints.get_pp_buffer_size_hint(1, 1) == two

    def look(group: Any) -> None:
        assert hints.get_agrs_num_max_session_bytes(group, (5,), torch.bfloat16) == 32
        several = [(5,), torch.Size([4, 4])]
        assert hints.get_agrs_num_max_session_bytes(group, several, torch.bfloat16) == 32 + 64
        assert hints.get_agrs_buffer_size_hint(group, two + 1) == 2 * two

    run_virtual(look, 2)


@pytest.mark.parametrize("transport", ["collective", "direct"])
def test_bad_input(transport: str) -> None:
    def call(group: Any) -> None:
        rank = group.rank()
        with tokenyard.ElasticBuffer(group, transport=transport) as buffer:
            with pytest.raises(ValueError, match=f"want engram_write first, on rank {rank}"):
                buffer.engram_fetch(torch.zeros(1, 1, dtype=torch.int32))
            with pytest.raises(ValueError, match="want pp_set_config first"):
                buffer.pp_send(torch.ones(1), (rank + 1) % 3)
            with pytest.raises(ValueError, match="want agrs_set_config first"):
                buffer.create_agrs_session()
            with pytest.raises(ValueError, match="sf is None, want the scales of all entries"):
                buffer.engram_write(torch.ones(2, 4).to(FP8))
            with pytest.raises(tokenyard.CallMismatch, match="ranks differ in entries"):
                buffer.engram_write(torch.ones(2 + (rank == 1), 4))
            with pytest.raises(tokenyard.CallMismatch, match="differ in num_max_tensor_bytes"):
                buffer.pp_set_config(32 + (rank == 1), 1)
            buffer.engram_write(torch.ones(2, 4))
            with pytest.raises(ValueError, match=r"indices\[0, 1\] is 6, want 0..5, on rank"):
                buffer.engram_fetch(torch.tensor([[0, 6]]))
            buffer.pp_set_config(32, 1)
            with pytest.raises(ValueError, match=r"dst_rank_idx is \d, want one of \["):
                buffer.pp_send(torch.ones(1), rank)
            with pytest.raises(ValueError, match="t has 36 bytes, want at most num_max_tensor_byt"):
                buffer.pp_send(torch.ones(9), (rank + 1) % 3)
            buffer.pp_send(torch.ones(2), (rank + 1) % 3)
            with pytest.raises(tokenyard.CallMismatch, match=r"t has 12 bytes on .* sent 8"):
                buffer.pp_recv(torch.ones(3), (rank - 1) % 3)
            buffer.agrs_set_config(96, 1)
            with pytest.raises(ValueError, match="no session is open"):
                buffer.all_gather(torch.ones(1))
            with buffer.agrs_new_session():
                with pytest.raises(ValueError, match="want at most 1 calls and 96 bytes"):
                    buffer.all_gather(torch.ones(9))
                _, late = buffer.all_gather(torch.ones(8))
                with pytest.raises(ValueError, match="call 2 of the session"):
                    buffer.all_gather(torch.ones(8))
                with pytest.raises(ValueError, match="a session is open"):
                    buffer.create_agrs_session()
                late()
            with buffer.agrs_new_session(), pytest.raises(ValueError, match="of an earlier sess"):
                late()

    run_virtual(call, 3)


def test_other_sizes_are_noticed() -> None:
    def call(group: Any) -> None:
        with tokenyard.ElasticBuffer(group, transport="direct") as buffer:
            buffer.agrs_set_config(1024, 4)
            with buffer.agrs_new_session():
                _, handle = buffer.all_gather(torch.ones(4 + group.rank()))
                with pytest.raises(tokenyard.CallMismatch, match="ranks differ in bytes: "):
                    handle()

    run_virtual(call, 2)


@pytest.mark.processes
@pytest.mark.faults
@pytest.mark.parametrize("call", ["pp_recv", "pp_send", "all_gather", "engram_write"])
@pytest.mark.parametrize("transport", ["direct", "collective"])
def test_a_dead_neighbour_is_named(transport: str, call: str) -> None:
    with Processes(2, timeout=scaled(120)) as pool:
        text, gone = pool.run(die, transport, call, may_die=True)
    assert isinstance(gone, Exited)
    assert "rank 1 died" in text, text


@pytest.mark.parametrize("transport", ["collective", "direct"])
def test_a_late_neighbour_is_named(transport: str) -> None:
    def call(group: Any) -> None:
        with tokenyard.ElasticBuffer(group, transport=transport, timeout=scaled(0.3)) as buffer:
            buffer.pp_set_config(64, 1)
            if group.rank() == 0:
                with pytest.raises(tokenyard.PeerTimeout, match=r"pp_recv: .*rank 1") as caught:
                    buffer.pp_recv(torch.ones(4), 1)
                assert caught.value.ranks == (1,)
                done.set()
            else:
                done.wait(scaled(20))

    done = threading.Event()
    run_virtual(call, 2)


def kept(group: Any, what: str) -> list[int]:
    """Descriptors after so many changes of the sizes."""
    told = []
    with tokenyard.ElasticBuffer(group, num_max_tokens_per_rank=8) as buffer:
        for n in range(31):
            size = 100_000 * (1 + n % 2)
            if what == "pipes":
                buffer.pp_set_config(size, 2)
                buffer.pp_send(torch.full((100,), 1.0 + group.rank()), 1 - group.rank())
                came = torch.zeros(100)
                buffer.pp_recv(came, 1 - group.rank())
                assert bool((came == 2.0 - group.rank()).all())
            elif what == "sessions":
                buffer.agrs_set_config(size, 2)
                with buffer.agrs_new_session():
                    _, handle = buffer.all_gather(torch.ones(100))
                    handle()
            else:
                buffer.engram_write(torch.ones(10 + n, 64))
            if n % 15 == 0:
                told.append(len(os.listdir("/proc/self/fd")))
    return told


@pytest.mark.processes
@pytest.mark.parametrize("what", ["pipes", "sessions", "table"])
def test_earlier_sizes_are_given_back(what: str, processes: Pools) -> None:
    for told in processes(2).run(kept, what):
        assert max(told) <= told[0] + 1, told
