"""A Buffer that is closed keeps no shared memory, before Python looks for circles."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import tokenyard
from tests.cases.clock import scaled
from tests.cases.closed import BALANCED, USES
from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tests.cases.shared_memory import shared_bytes
from tokenyard.nn.share import own_parameters, shares
from tokenyard.testing import run_virtual
from tokenyard.types import round_up

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no shared memory"),
]
WAYS: list[dict[str, Any]] = [
    {},
    {"transport": "ring"},
    {"transport": "hierarchical", "ranks_per_node": 1},
]


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def own_bytes(model: nn.Module) -> int:
    """The pages that the rank's own experts lie in, where ranks read each other's."""
    total = 0
    for _, part, share in shares(model):
        for one in own_parameters(part) if share.stacks is not None else ():
            begin = one.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            total += round_up(one.data_ptr() + one.nbytes - begin, mmap.PAGESIZE)
    return total


def close(group: Any, name: str, options: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes that stay mapped: with what users hold, less their own experts; then without; and how
    many were mapped before the Buffer was closed.
    """
    for _ in range(2):  # torch makes circles when it first does something
        with no_collector():
            before = shared_bytes()[1]
            buffer, held = USES[name](group, timeout=scaled(60), **options)
            during = shared_bytes()[1] - before
            buffer.destroy()
            with_held = shared_bytes()[1] - before
            if name == "layers":
                with_held -= own_bytes(held)
            del buffer, held
            after = shared_bytes()[1] - before
    return with_held, after, during


CASES = [(name, way) for way in WAYS for name in USES]
CASES += [(name, {**way, "balance": "exact"}) for way in WAYS for name in BALANCED]


IN_GATE = [one for one in CASES if "transport" not in one[1]]


@pytest.mark.parametrize("case", at_night(CASES, gate=IN_GATE), ids=str)
def test_nothing_stays_mapped(processes: Pools, case: tuple[str, dict[str, Any]]) -> None:
    for with_held, after, during in processes(2).run(close, *case):
        assert (with_held, after) == (0, 0)
        assert during > 0


def test_virtual_ranks_leave_nothing_mapped() -> None:
    """Their segments are of one process, which maps each of them once for each rank."""

    def use(group: Any) -> None:
        for name in BALANCED:
            buffer, _ = USES[name](group, balance="exact")
            buffer.close()

    for _ in range(2):
        with no_collector():
            before = shared_bytes()
            run_virtual(use, 2)
            after = shared_bytes()
    assert after == before


def use_what_is_left(group: Any) -> None:
    buffer, model = USES["layers"](group, balance="exact")
    stack = buffer.share_stack(torch.full((2, 1024), float(group.rank())))
    own = model.experts
    rows, ends = torch.randn(8, own.down.shape[2]), torch.arange(1, 5, dtype=torch.int32) * 2
    with torch.no_grad():
        before = own(rows, ends[: len(own.ids)])
        buffer.close()
        assert torch.equal(own(rows, ends[: len(own.ids)]), before)
        own.down.add_(1)
    assert stack.node.mean(1).tolist() == [0, 0, 1, 1]  # a tensor that lives keeps its memory
    with pytest.raises(tokenyard.BufferClosed):
        model(torch.randn(4, rows.shape[1]))


def test_what_is_left_of_a_model_can_be_used(processes: Pools) -> None:
    processes(2).run(use_what_is_left)


def close_a_transformer(group: Any) -> int:
    from tests.cases.transformers.moe import tokens_of, whole_model
    from tokenyard.integrations.transformers import expert_parallel

    for _ in range(2):
        gc.collect()
        before = shared_bytes()[1]
        options: dict[str, Any] = {"timeout": scaled(60), "balance": 0.0}
        model = expert_parallel(whole_model("mixtral"), group, **options).eval()
        with torch.no_grad():
            model(tokens_of(group.rank()))
        with no_collector():
            model.tokenyard_buffer.close()
            left = shared_bytes()[1] - before - own_bytes(model)
        del model
    return left


def test_experts_of_transformers_keep_their_own_memory_alone(processes: Pools) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert processes(2).run(close_a_transformer) == [0, 0]
