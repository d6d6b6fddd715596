"""A rank that cannot make a call says so to the others; and numbers that ranks must give alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import tokenyard
from tokenyard.testing import routing, run_virtual

pytestmark = pytest.mark.faults


def exchange(buffer: tokenyard.Buffer, rank: int, *tags: int) -> torch.Tensor:
    """A dispatch and a combine, each with its tag."""
    first, second = tags or (-1, -1)
    topk_idx, weights = routing("uniform", 8, 2, 6, seed=rank)
    got = buffer.dispatch(
        torch.full((8, 16), 1.0), topk_idx=topk_idx, topk_weights=weights, num_experts=6, tag=first
    )
    assert isinstance(got.recv_x, torch.Tensor)
    assert got.handle is not None
    return buffer.combine(got.recv_x, got.handle, tag=second).x


@pytest.mark.parametrize("transport", ["direct", "ring", "collective"])
def test_a_rank_refuses_whatever_the_others_call(transport: str) -> None:
    def job(group: Any) -> list[str]:
        said, rank = [], group.rank()
        end = ValueError("the file of data has ended")
        with tokenyard.Buffer(group, transport=transport) as buffer:
            topk_idx, weights = routing("uniform", 8, 2, 6, seed=rank)
            dispatch = partial(
                buffer.dispatch,
                torch.ones(8, 16),
                topk_idx=topk_idx,
                topk_weights=weights,
                num_experts=6,
            )
            got: Any = dispatch()
            combine = partial(buffer.combine, got.recv_x, got.handle)
            for call in (dispatch, combine):
                step = partial(buffer.refuse, end) if rank == 1 else call
                with pytest.raises(ValueError, match="has ended") as info:
                    step()
                said.append(f"{type(info.value).__name__}: {info.value}")
            exchange(buffer, rank)  # the Buffer still works
        return said

    first, second, third = run_virtual(job, 3).results
    assert second == ["ValueError: the file of data has ended"] * 2
    for told in (*first, *third):
        assert told == (
            "PeerInputError: rank 1 rejected its input, so no rank went on: "
            "the file of data has ended"
        )


def test_tags_must_be_alike() -> None:
    def job(group: Any) -> list[str]:
        said = []
        with tokenyard.Buffer(group) as buffer:
            exchange(buffer, group.rank(), 7, 8)
            for tags in ((group.rank(), 0), (3, group.rank())):
                with pytest.raises(tokenyard.CallMismatch) as info:
                    exchange(buffer, group.rank(), *tags)
                assert info.value.what == "tag"
                said.append(str(info.value))
            with pytest.raises(ValueError, match="tag is 'a', want an integer"):
                exchange(buffer, group.rank(), "a", 0)  # type: ignore[arg-type]
        return said

    assert run_virtual(job, 2).results[0] == [
        "dispatch: ranks differ in tag: 0 on rank 0, 1 on rank 1",
        "combine: ranks differ in tag: 0 on rank 0, 1 on rank 1",
    ]
