"""Compiled calls between nodes: which calls they make, and that they are the engine's."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tests.cases.processes import Pools
from tokenyard.engine.compiled_nodes import CompiledNodeCalls
from tokenyard.engine.nodes_handle import NodesHandle
from tokenyard.testing import assert_same, numbered_tokens, routing, run_virtual
from tokenyard.transports.hierarchical.staging import Staging
from tokenyard.wire.exchange_table import HEARD, POSTED
from tokenyard.wire.message import PAYLOAD
from tokenyard.wire.nodes_table import BEFORE

SHAPES = [(1, 1), (2, 2), (3, 2, 1)]
EXPERTS = 12


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not change which way a combine goes."""
    monkeypatch.setattr(Staging, "soon", scaled(60))


def inputs(rank: int, turn: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    num_tokens = (turn * 3 + rank * 5) % 9
    x = numbered_tokens(num_tokens, 40, first=100 * rank + turn).to(dtype)
    topk_idx, topk_weights = routing("holes", num_tokens, 3, EXPERTS, seed=10 * turn + rank)
    return {
        "x": x,
        "topk_idx": topk_idx,
        "topk_weights": topk_weights,
        "num_experts": EXPERTS,
        "expert_alignment": 1 + turn % 2,
    }


def open_buffer(group: Any, sizes: tuple[int, ...]) -> tokenyard.Buffer:
    """A Buffer whose ranks have heard how much they will enclose."""
    buffer = tokenyard.Buffer(
        group, transport="hierarchical", ranks_per_node=list(sizes), timeout=scaled(60)
    )
    x, topk_idx = torch.ones(64, 40), torch.arange(64 * 3).view(64, 3) % EXPERTS
    for _ in range(2):
        got: Any = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=torch.ones(64, 3), num_experts=EXPERTS
        )
        buffer.combine(got.recv_x, got.handle)
    return buffer


def fields(handle: tokenyard.Handle) -> list[Any]:
    flow = handle.flow
    return [
        *handle[3:],
        flow.route.send_token,
        list(flow.route.send_counts),
        list(flow.recv_counts),
        flow.tokens_R.tolist(),
        flow.most_rows,
    ]


def both_ways(group: Any, sizes: tuple[int, ...]) -> None:
    with open_buffer(group, sizes) as buffer:
        compiled: Any = buffer._engine.compiled
        assert isinstance(compiled, CompiledNodeCalls)
        for turn, dtype in enumerate([torch.bfloat16, torch.float16, torch.float32, torch.float64]):
            given = inputs(group.rank(), turn, dtype)
            quick: Any = buffer.dispatch(**given)
            assert type(quick.handle) is NodesHandle
            compiled.leave_at = POSTED
            slow: Any = buffer.dispatch(**given)
            assert type(slow.handle) is tokenyard.Handle
            assert_same(list(quick[:4]), list(slow[:4]))
            y = quick.recv_x * 2
            want = buffer.combine(y, slow.handle).x
            assert_same(buffer.combine(y, quick.handle).x, want)
            compiled.leave_at = 0
            for handle in (
                quick.handle,
                replace(quick.handle, hidden=40),
                copy.deepcopy(quick.handle),
                pickle.loads(pickle.dumps(quick.handle)),
            ):
                assert_same(buffer.combine(y, handle).x, want)
                assert_same(buffer.dispatch(given["x"], handle=handle).recv_x, quick.recv_x)
                assert_same(fields(handle), fields(slow.handle))


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_both_ways_are_alike(sizes: tuple[int, ...]) -> None:
    run = run_virtual(both_ways, sum(sizes), sizes)
    assert len(run.results) == sum(sizes)


def leave_and_go_on(group: Any, sizes: tuple[int, ...], phase: int) -> list[Tensor]:
    """Rank 1 leaves its compiled calls at this phase; the others do not."""
    out = []
    with open_buffer(group, sizes) as buffer:
        compiled: Any = buffer._engine.compiled
        for turn in range(5):
            given = inputs(group.rank(), turn)
            compiled.leave_at = phase if group.rank() == 1 else 0
            got: Any = buffer.dispatch(**given)
            out += [*got[:3], buffer.combine(got.recv_x, got.handle).x]
    return out


@pytest.mark.processes
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (3, 1)], ids=str)
def test_one_rank_leaves_a_compiled_call(sizes: tuple[int, ...], processes: Pools) -> None:
    ranks = processes(sum(sizes))
    wanted = ranks.run(leave_and_go_on, sizes, 0)
    for phase in (POSTED, HEARD):
        assert_same(ranks.run(leave_and_go_on, sizes, phase), wanted)


def other_calls(group: Any) -> list[bool]:
    """Whether each of these calls is compiled."""
    made = []
    with open_buffer(group, (1, 1)) as buffer:
        given = inputs(group.rank(), 2)
        wide = torch.zeros(given["x"].shape[0], 80, dtype=torch.bfloat16)
        for more in (
            {},
            {"x": wide[:, ::2]},
            {"x": torch.nn.Parameter(given["x"], requires_grad=False)},
            {"num_worst_tokens": 64},
            {"async_finish": True},
        ):
            got: Any = buffer.dispatch(**{**given, **more})
            if got.event.event is not None:
                got.event.current_stream_wait()
            made.append(type(got.handle) is NodesHandle)
    return made


def test_other_calls_are_the_engines() -> None:
    for answer in run_virtual(other_calls, 2).results:
        assert answer == [True, False, False, False, False]


def test_a_switch_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENYARD_COMPILED_CALLS", "0")
    assert run_virtual(other_calls, 2).results == [[False] * 5] * 2


def lie(group: Any) -> str:
    """Rank 1 tells of more rows than its parcel has."""
    with open_buffer(group, (1, 1)) as buffer:
        compiled: Any = buffer._engine.compiled
        given = inputs(group.rank(), 2)
        buffer.dispatch(**given)
        (plan,) = [one for one in compiled._plans.values() if one.shape[1] == torch.bfloat16]
        if group.rank() == 1:
            key = next(key for key, one in compiled._plans.items() if one is plan)

            def pack() -> int:
                verdict = plan.steps.pack()
                sent = compiled._enclosures.staging.sent[0].numpy().view("int64")
                sent[BEFORE + PAYLOAD] += 1
                return int(verdict)

            compiled._plans[key] = plan._replace(steps=plan.steps._replace(pack=pack))
        try:
            buffer.dispatch(**given)
        except tokenyard.PeerError as error:
            return str(error)
        return "nothing"


def test_counts_that_cannot_be() -> None:
    told = run_virtual(lie, 2).results[0]
    assert told == "dispatch: rank 1 enclosed what no rank encloses, on rank 0"
