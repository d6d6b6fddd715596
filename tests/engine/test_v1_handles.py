"""Handles as DeepEP V1's callers keep them: as tuples, and past the life of their Buffer."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.processes import Pools
from tests.cases.v1_handles import (
    by_expert_elsewhere,
    different_buffers,
    inputs,
    replace_buffers,
    train_with_tuples,
)
from tokenyard.compat import v1_tuple
from tokenyard.testing import run_virtual

OPTIONS: dict[str, dict[str, Any]] = {
    "direct": {"transport": "direct"},
    "ring": {"transport": "ring"},
    "collective": {"transport": "collective"},
    "nodes": {"transport": "hierarchical", "ranks_per_node": 1},
}


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Errors of earlier tests may hold handles until they are collected."""
    gc.collect()


@pytest.mark.processes
@pytest.mark.parametrize("name", OPTIONS)
def test_tuples_through_save_for_backward(processes: Pools, name: str) -> None:
    assert processes(2).run(train_with_tuples, OPTIONS[name]) == [0, 0]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_tuples_of_virtual_ranks(num_ranks: int) -> None:
    run_virtual(train_with_tuples, num_ranks, {})
    assert v1_tuple.num_issued() == 0


@pytest.mark.processes
@pytest.mark.parametrize("destroy", [False, True], ids=["kept", "destroyed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_buffer_that_was_replaced(processes: Pools, name: str, destroy: bool) -> None:
    assert processes(2).run(replace_buffers, OPTIONS[name], destroy) == [None, None]


def test_virtual_ranks_replace_buffers() -> None:
    assert run_virtual(replace_buffers, 3, {}, True).results == [None] * 3


@pytest.mark.processes
@pytest.mark.parametrize("name", OPTIONS)
def test_handles_of_different_buffers_are_told_apart(processes: Pools, name: str) -> None:
    first, second = processes(2).run(different_buffers, OPTIONS[name])
    differ = "combine: ranks differ in the handle (by the number of the call that made it): "
    other = "one of another Buffer"
    assert first == [
        f"{differ}{other} on rank 0, {other} on rank 1",
        f"{differ}0 on rank 0, {other} on rank 1",
    ]
    assert len(second) == 2


@pytest.mark.processes
@pytest.mark.parametrize("name", OPTIONS)
def test_other_handles_of_another_buffer(processes: Pools, name: str) -> None:
    assert processes(2).run(by_expert_elsewhere, OPTIONS[name]) == [None, None]


def ten_fields(group: Any, transport: str) -> list[Any]:
    """Four ranks on two nodes, two channels: rank r's token t goes to experts of ranks t and r."""
    with tokenyard.Buffer(group, ranks_per_node=2, transport=transport) as buffer:
        topk_idx = torch.tensor([[token, buffer.rank] for token in range(4)])
        topk_idx[buffer.rank, 1] = -1
        got: Any = buffer.dispatch(
            torch.ones(4, 8),
            topk_idx=topk_idx,
            topk_weights=torch.ones(4, 2),
            num_experts=4,
            config=tokenyard.Config(4),
        )
        fields = tuple(got.handle)
        assert len(fields) == len(got.handle) == 10
        assert torch.equal(got.handle[-4], fields[6])
        again = buffer.combine(got.recv_x, fields)
        assert torch.equal(again.x, buffer.combine(got.recv_x, got.handle).x)
        return [None if one is None else one.tolist() for one in fields]


@pytest.mark.parametrize("transport", ["hierarchical", "collective"])
def test_fields_between_nodes(transport: str) -> None:
    """Rank 1 gets its own four tokens, and token 1 of each other rank."""
    in_rank, to_node, to_rank, no, nor, begins, sums, meta, heads, none = run_virtual(
        ten_fields, 4, transport
    ).results[1]
    assert in_rank == [[r in (token, 1) for r in range(4)] for token in range(4)]
    assert to_node == [[2, 4], [0, 2]]
    assert to_rank == [[1, 1], [2, 4], [0, 1], [0, 1]]
    assert sums == [1, 5, 6, 7]
    assert begins == [[0, 1], [1, 3], [5, 6], [6, 7]]
    assert heads == [[0, -1], [1, -1], [0, 0], [1, 1]]
    assert no is nor is meta is none is None


def lives(group: Any) -> None:
    with tokenyard.Buffer(group) as buffer:
        x, topk_idx, weights = inputs(0, 8)
        got: Any = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=4)
        fields: Any = list(got.handle)
        want = buffer.combine(got.recv_x, got.handle).x
        got = got._replace(handle=None)
        assert v1_tuple.num_issued() == 1
        assert torch.equal(buffer.combine(got.recv_x, tuple(fields)).x, want)
        assert torch.equal(buffer.combine(got.recv_x, fields).x, want)
        del fields
        assert v1_tuple.num_issued() == 0


def test_a_tuple_keeps_its_handle_alive() -> None:
    gc.disable()
    try:
        run_virtual(lives, 1)
    finally:
        gc.enable()
    assert v1_tuple.num_issued() == 0


def broken_tuples(group: Any) -> None:
    with tokenyard.Buffer(group) as buffer:
        x, topk_idx, weights = inputs(0, 8)
        got: Any = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=4)
        fields = list(got.handle)
        copied: Any = pickle.loads(pickle.dumps(fields))
        broken: Any
        for broken in (copied, fields[1:], fields[:-1], [], (3, 4)):
            with pytest.raises(ValueError, match="want the handle that dispatch returned, or all"):
                buffer.combine(got.recv_x, tuple(broken))


def test_what_is_no_tuple_of_a_handle() -> None:
    assert run_virtual(broken_tuples, 1).results == [None]


class _Fields(tuple):
    """Stands for a handle in a test of memory that a device would free."""


def test_memory_of_a_device_is_looked_after() -> None:
    """Ordinary memory stands for a device's, since both are watched by their storage."""
    handle, first = _Fields((1, 2)), torch.zeros(3, 3)
    v1_tuple.watch_device(handle, first)
    view = first[:2]
    del first
    assert v1_tuple.find((view, 2)) is handle
    assert v1_tuple.num_issued() == 1
    del view
    assert v1_tuple.num_issued() == 0
