"""Names of Buffer that are about hardware, which callers of DeepEP use all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenyard
from tokenyard.testing import run_virtual


def scratch(group: Any) -> None:
    with tokenyard.Buffer(
        group, num_nvl_bytes=64, num_rdma_bytes=1 << 20, use_fabric=True
    ) as buffer:
        assert buffer.is_sm90_compiled() is tokenyard.Buffer.is_sm90_compiled() is True
        whole = buffer.get_local_buffer_tensor(torch.int32)
        assert (whole.shape, whole.dtype) == ((16,), torch.int32)
        whole.copy_(torch.arange(16))
        part = buffer.get_local_buffer_tensor(torch.int32, torch.Size([2, 3]), offset=8)
        assert part.tolist() == [[2, 3, 4], [5, 6, 7]]
        buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True).zero_()
        assert whole[15] == 15
        for size, offset, text in (
            ((17,), 0, r"size is \(17,\), want at most 16 elements of torch.int32"),
            (None, 2, "offset is 2, want a multiple of 4"),
            (None, 68, "offset is 68, want at most 64"),
        ):
            with pytest.raises(ValueError, match=text):
                buffer.get_local_buffer_tensor(torch.int32, size, offset)
    with pytest.raises(tokenyard.BufferClosed):
        buffer.get_local_buffer_tensor(torch.int32)


def test_the_local_buffer_is_memory_that_no_call_uses() -> None:
    assert run_virtual(scratch, 2).results == [None, None]
