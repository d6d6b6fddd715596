"""Calls by expert that cannot be made: all ranks raise, and the Buffer goes on."""

from __future__ import annotations

import os
import time
from array import array
from functools import partial
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.inside import engine_of, send_instead, transport_of
from tests.cases.processes import Pools
from tokenyard.testing import Processes
from tokenyard.wire import message as say

pytestmark = pytest.mark.processes

NUM_RANKS, CULPRIT, NUM_EXPERTS = 3, 1, 6


@pytest.fixture
def ranks(processes: Pools) -> Processes:
    return processes(NUM_RANKS)


def good(rank: int) -> dict[str, Any]:
    return {
        "x": torch.full((2, 4), 1.0 + rank),
        "topk_idx": torch.tensor([[0, 3], [5, -1]]),
        "topk_weights": torch.ones(2, 2),
        "num_experts": NUM_EXPERTS,
    }


def misuse(group: Any, transport: str, wrong: str) -> str:
    """What this rank is told when the culprit makes a wrong call, and others a right one."""
    with tokenyard.Buffer(group, transport=transport, timeout=scaled(60)) as buffer:
        given = good(buffer.rank)
        got: Any = buffer.dispatch_by_expert(**given)
        plain: Any = buffer.dispatch(**given).handle
        y, handle, x = got.x.clone(), got.handle, given["x"]
        large = torch.zeros(len(y) + 2, 4)
        is_culprit, bad = buffer.rank == CULPRIT, dict[str, Any]()
        of_dispatch: dict[str, dict[str, Any]] = {
            "expert": {"topk_idx": torch.tensor([[0, 3], [6, -1]])},
            "no ids": {"topk_idx": None},
            "no weights": {"topk_weights": None},
            "alignment": {"expert_alignment": 0},
            "large alignment": {"expert_alignment": 1 << 17},
            "experts": {"num_experts": 12},
            "tag": {"tag": 5},
        }
        of_combine: dict[str, dict[str, Any]] = {
            "rows": {"y": y[:-1] if len(y) else y.new_zeros(1, 4)},
            "hidden": {"y": y[:, :3]},
            "no handle": {"handle": None},
            "plain handle": {"handle": plain},
            "weigh": {"weigh": 1},
            "out": {"out": torch.empty(5, 4)},
            "same memory": {"y": large[2:], "out": large[1:3]},
        }
        try:
            if wrong == "another call" and is_culprit:
                buffer.dispatch(**given)
            elif wrong in of_dispatch or wrong == "another call":
                if is_culprit:
                    bad = of_dispatch[wrong]
                buffer.dispatch_by_expert(**{**given, **bad})
            else:
                if is_culprit:
                    bad = of_combine[wrong]
                buffer.combine_by_expert(**{"y": y, "handle": handle, **bad})
        except ValueError as error:
            sums = buffer.combine_by_expert(got.x, handle)  # the Buffer goes on
            assert torch.equal(sums, x * torch.tensor([[2.0], [1.0]]))
            return str(error)
    return "nothing"


REJECTED = {
    "expert": "dispatch by expert: topk_idx[1, 0] is 6, want -1..5 (num_experts=6), on rank 1",
    "no ids": "dispatch by expert: topk_idx is None, want a torch.Tensor, on rank 1",
    "no weights": "dispatch by expert: topk_idx is given alone, want topk_idx and topk_weights",
    "alignment": "dispatch by expert: expert_alignment is 0, want",
    "large alignment": "dispatch by expert: expert_alignment is 131072, want",
    "rows": "combine by expert: y has shape [",
    "no handle": "combine by expert: handle is None, want the handle that dispatch returned",
    "plain handle": "combine by expert: handle is of dispatch call 1, want one that dispatch_by",
    "weigh": "combine by expert: weigh is 1, want True or False, on rank 1",
    "out": "combine by expert: out has shape [5, 4], want [2, 4]",
    "same memory": "combine by expert: out shares memory with what is to be summed",
}
DIFFER = {
    "experts": "dispatch by expert: ranks differ in num_experts: 6 on rank 0, 12 on rank 1",
    "tag": "dispatch by expert: ranks differ in tag: none on rank 0, 5 on rank 1",
    "hidden": "combine by expert: ranks differ in hidden size: 4 on rank 0, 3 on rank 1",
    "another call": "dispatch by expert: ranks differ in what they call: dispatch by expert on",
}
WAYS = pytest.mark.parametrize("transport", ["direct", "collective"])


@WAYS
@pytest.mark.parametrize("wrong", REJECTED)
def test_bad_input_raises_on_all_ranks(ranks: Processes, transport: str, wrong: str) -> None:
    texts = ranks.run(misuse, transport, wrong)
    assert texts[CULPRIT].startswith(REJECTED[wrong])
    for rank in (0, 2):
        assert texts[rank].startswith("rank 1 rejected its input, so no rank went on: ")
        assert REJECTED[wrong][:30] in texts[rank]


@WAYS
@pytest.mark.parametrize("wrong", DIFFER)
def test_calls_that_differ_raise_on_all_ranks(ranks: Processes, transport: str, wrong: str) -> None:
    texts = ranks.run(misuse, transport, wrong)
    assert "nothing" not in texts
    assert texts[0].startswith(DIFFER[wrong])


def lie(group: Any, payload: list[int]) -> str:
    """The culprit tells numbers of tokens that cannot be."""
    with tokenyard.Buffer(group, transport="direct", timeout=scaled(20)) as buffer:
        given = good(buffer.rank)
        buffer.dispatch_by_expert(**given)
        if buffer.rank == CULPRIT:
            send_instead(buffer, "dispatch by expert", {say.TOKENS: 2}, payload)
            return ""
        with pytest.raises(tokenyard.PeerError) as raised:
            buffer.dispatch_by_expert(**given)
        return str(raised.value)


@pytest.mark.parametrize("payload", [[-9, 1, 1], [3, 3, 3]], ids=["negative", "too many"])
def test_a_rank_that_tells_nonsense_is_named(payload: list[int]) -> None:
    with Processes(NUM_RANKS, timeout=scaled(120)) as ranks:
        for rank, text in enumerate(ranks.run(lie, payload, may_die=True)):
            assert rank == CULPRIT or "rank 1 wrote what no rank writes" in text


def lie_of_parcels(group: Any, what: str) -> str:
    """The culprit names memory that holds something else than it has told."""
    with tokenyard.Buffer(group, transport="direct", timeout=scaled(20)) as buffer:
        buffer.dispatch_by_expert(**good(buffer.rank))
        pool: Any = transport_of(buffer).node.pool
        other, memory = pool.take(64 if what == "size" else 1 << 16)
        memory[:] = {"size": 0, "experts": 77, "counts": 255}[what]
        if buffer.rank == CULPRIT:
            plan = next(iter(engine_of(buffer).calls.plans._known.values()))
            made = plan.call

            def call() -> int:
                plan.head[say.SEGMENTS : say.SEGMENTS + 3] = array("q", other.told)
                return int(made())

            plan.call = call
        given = good(buffer.rank)
        if what == "size":
            more = 1 << 14
            given = {
                "x": torch.ones(more, 4),
                "topk_idx": torch.zeros(more, 2, dtype=torch.int64),
                "topk_weights": torch.ones(more, 2),
                "num_experts": NUM_EXPERTS,
            }
        try:
            buffer.dispatch_by_expert(**given)
        except tokenyard.PeerError as error:
            return str(error)
        return "nothing"


@pytest.mark.parametrize("what", ["size", "experts", "counts"])
def test_a_rank_whose_parcel_is_not_what_it_told_is_named(what: str) -> None:
    with Processes(NUM_RANKS, timeout=scaled(120)) as ranks:
        for rank, text in enumerate(ranks.run(lie_of_parcels, what)):
            if rank != CULPRIT:
                assert "rank 1 wrote what no rank writes" in text


def late(make_known: Any, *told: Any) -> None:
    time.sleep(scaled(0.5))
    make_known(*told)


def leave_right_after(group: Any) -> list[float]:
    """Rank 0 sends tokens in its last call alone, and rank 1 is slow to map what is new to it."""
    buffer = tokenyard.Buffer(group, transport="direct")
    given: dict[str, Any] = {"num_experts": 4}
    for turn in range(3):
        num_tokens = 4 if group.rank() or turn == 2 else 0
        if group.rank() and turn == 2:
            attached = engine_of(buffer).transport.node.attached
            attached.make_known = partial(late, attached.make_known)
        ids = torch.arange(num_tokens)[:, None] % 4
        x, weights = torch.ones(num_tokens, 16), torch.ones(num_tokens, 1)
        rows: Any = buffer.dispatch_by_expert(x, ids, weights, **given).x
    if group.rank() == 0:
        os._exit(0)
    return [float(rows.sum())]


def test_a_rank_may_end_when_its_rows_have_been_told_of() -> None:
    with Processes(2, timeout=scaled(120)) as pair:
        _, came = pair.run(leave_right_after, may_die=True)
    assert came == [4 * 16.0]
