"""The low-latency mode as callers of DeepEP V1, and of its forks, use it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.low_latency_rounds import Rounds
from tests.cases.processes import Pools
from tokenyard.testing import Exited, Processes, assert_same, run_virtual


def fill_and_drop(group: Any, transport: str) -> None:
    """DeepEP's own test: fill the buffer, drop it, and pass another x of that shape."""
    with tokenyard.Buffer(group, low_latency_mode=True, transport=transport) as buffer:
        x, idx = torch.randn(4, 32), torch.tensor([[0, 3], [1, 2], [3, -1], [2, 0]])
        weights = torch.rand(4, 2)
        hows: list[dict[str, Any]] = [{}, {"return_recv_hook": True}, {"async_finish": True}]
        for how in hows:
            got: Any = buffer.low_latency_dispatch(x, idx, 4, 4, use_fp8=False)
            y = got.recv_x * 2
            want = buffer.low_latency_combine(y, idx, weights, got.handle).combined_x.clone()
            for _ in range(2):
                buffer.get_next_low_latency_combine_buffer(got.handle)[:, :, :] = -y
                buffer.get_next_low_latency_combine_buffer(got.handle)[:, :, :] = y
                back = buffer.low_latency_combine(
                    torch.zeros_like(y), idx, weights, got.handle, zero_copy=True, **how
                )
                if back.hook is not None:
                    back.hook()
                elif back.event.event is not None:
                    back.event.current_stream_wait()
                assert_same(back.combined_x, want, "combined")
            earlier = buffer.get_next_low_latency_combine_buffer(got.handle)
            earlier.copy_(y)
            buffer.get_next_low_latency_combine_buffer(got.handle).fill_(7)
            back = buffer.low_latency_combine(earlier, idx, weights, got.handle, zero_copy=True)
            assert_same(back.combined_x, want, "a buffer that was given before the last")


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["direct", "collective"])
def test_zero_copy_reads_the_buffer_whatever_x_is(processes: Pools, transport: str) -> None:
    assert processes(2).run(fill_and_drop, transport) == [None, None]


def test_zero_copy_of_virtual_ranks() -> None:
    assert run_virtual(fill_and_drop, 2, "auto").results == [None, None]


def arguments_of_forks(group: Any) -> list[str]:
    told = []
    with tokenyard.Buffer(group, low_latency_mode=True) as buffer:
        x, idx, weights = torch.ones(2, 128), torch.tensor([[0], [1]]), torch.ones(2, 1)
        off: dict[str, Any] = {"use_nvfp4": False, "x_global_scale": None, "opt_level": 1}
        got: Any = buffer.low_latency_dispatch(x, idx, 2, 2, use_fp8=False, **off)
        signals: dict[str, Any] = {
            "overlap": True,
            "packed_recv_count": got.recv_count,
            "comp_signal": torch.ones(2, dtype=torch.int32),
            "block_m": 64,
            "threshold": 4,
            "num_sms": 3,
        }
        back = buffer.low_latency_combine(got.recv_x, idx, weights, got.handle, **signals)
        assert torch.equal(back.combined_x, x)
        for name, value in {
            "use_nvfp4": True,
            "x_global_scale": torch.ones(1),
            "pertoken_quant": True,
            "align_fp8_quantization": True,
        }.items():
            on: dict[str, Any] = {name: value} if group.rank() == 1 else {}
            with pytest.raises(ValueError) as caught:
                buffer.low_latency_dispatch(x, idx, 2, 2, **on)
            told.append(str(caught.value))
        with pytest.raises(TypeError, match="unexpected keyword argument 'use_fp9'"):
            buffer.low_latency_dispatch(x, idx, 2, 2, use_fp9=True)
        with pytest.raises(TypeError, match=r"low_latency_combine\(\) got an unexpected"):
            buffer.low_latency_combine(got.recv_x, idx, weights, got.handle, use_nvfp4=False)
        on_device = torch.empty(got.recv_x.shape, device="meta")  # no device's memory to wait for
        with pytest.raises(ValueError, match="comp_signal is given, want None: combine waits for"):
            buffer.low_latency_combine(on_device, idx, weights, got.handle, **signals)
        Rounds(buffer).check(1)
    return told


def test_arguments_of_forks_are_accepted_or_refused_by_name() -> None:
    other, own = run_virtual(arguments_of_forks, 2).results
    assert own == [
        "low-latency dispatch: use_nvfp4 is True, want use_fp8, or rows in their own dtype: there "
        "is no cast to NVFP4, on rank 1",
        "low-latency dispatch: x_global_scale is given, want None: it is a scale of NVFP4, to "
        "which there is no cast, on rank 1",
        "low-latency dispatch: pertoken_quant is True, want False: FP8 has a scale for each 128 "
        "elements of a row, on rank 1",
        "low-latency dispatch: align_fp8_quantization is True, want False: scales are those of "
        "DeepEP's own cast, on rank 1",
    ]
    assert other == [f"rank 1 rejected its input, so no rank went on: {text}" for text in own]


def clean(group: Any) -> list[str]:
    told = []
    with tokenyard.Buffer(group, low_latency_mode=True) as buffer:
        rounds = Rounds(buffer)
        held = rounds.dispatch(0)
        wrong: Any = 16.5
        for hidden in (16, wrong if group.rank() == 1 else 16, 24 if group.rank() == 1 else 16):
            try:
                buffer.clean_low_latency_buffer(4, hidden, 6)
            except ValueError as error:
                told.append(f"{type(error).__name__}: {error}")
        rounds.check_received(held, 0)
        rounds.check(1)
    return told


def test_cleaning_meets_all_ranks() -> None:
    first, second = run_virtual(clean, 2).results
    assert "hidden is 16.5" in second[0]
    assert "rank 1 rejected its input" in first[0]
    assert "ranks differ in hidden size: 16 on rank 0, 24 on rank 1" in first[1]


def clean_without_one(group: Any) -> list[int]:
    with tokenyard.Buffer(
        group, low_latency_mode=True, enable_shrink=True, timeout=scaled(60)
    ) as buffer:
        Rounds(buffer).check(0)
        if group.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        buffer.clean_low_latency_buffer(8, 64, 6)
        status = torch.zeros(group.size(), dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        return status.tolist()


@pytest.mark.processes
def test_cleaning_finds_the_dead() -> None:
    """What DeepEP's test_low_latency.py --shrink-test asks for."""
    with Processes(3, timeout=scaled(120)) as ranks:
        answers = ranks.run(clean_without_one, may_die=True)
    assert answers.pop(1) == Exited(-signal.SIGKILL)
    assert answers == [[0, 1, 0], [0, 1, 0]]


def logfmt_refused(group: Any) -> list[str]:
    told = []
    with tokenyard.Buffer(group, low_latency_mode=True) as buffer:
        for hidden, dtype in ((128, torch.bfloat16), (512, torch.float32), (512, torch.bfloat16)):
            x, idx = torch.rand(2, hidden).to(dtype), torch.tensor([[0], [1]])
            weights = torch.ones(2, 1)
            got: Any = buffer.low_latency_dispatch(x, idx, 2, 2, use_fp8=False)
            mixed = hidden == 512 and dtype is torch.bfloat16
            ways: list[dict[str, Any]] = [{"use_logfmt": True}, {}]
            if mixed:
                ways[0]["zero_copy"] = True
            for way in ways:
                try:
                    buffer.low_latency_combine(got.recv_x, idx, weights, got.handle, **way)
                except ValueError as error:
                    told.append(str(error))
        different: dict[str, Any] = {"use_logfmt": group.rank() == 1}
        try:
            buffer.low_latency_combine(got.recv_x, idx, weights, got.handle, **different)
        except tokenyard.CallMismatch as error:
            told.append(str(error))
    return told


def test_what_logfmt_cannot_cast() -> None:
    told, _ = run_virtual(logfmt_refused, 2).results
    stage = "low-latency combine"
    assert told == [
        f"{stage}: x has hidden size 128, want a multiple of 512 with use_logfmt=True, on rank 0",
        f"{stage}: x is torch.float32 with use_logfmt=True, want torch.bfloat16, on rank 0",
        f"{stage}: use_logfmt and zero_copy are both True, want one at most: rows are cast, on "
        "rank 0",
        f"{stage}: ranks differ in dtype of x: bfloat16 on rank 0, float32 on rank 1",
    ]
