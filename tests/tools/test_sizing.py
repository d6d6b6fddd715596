"""What `sizing` says is what real Buffers take."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tokenyard
from tests.cases.clock import scaled
from tokenyard.testing import numbered_tokens, routing, run_virtual
from tokenyard.tools.cli.app import COMMANDS
from tokenyard.tools.cli.group import make_app
from tokenyard.tools.sizing import OWN, SHARED, Workload, parts, total

FIRST = 1 << 16  # bytes that a first call takes before sizes are known


def taken(group: Any, work: Workload) -> tuple[int, dict[str, int]]:
    """On each rank: rows that arrived, and the bytes that it shares, by part."""
    rank = group.rank()
    idx, weights = routing("uniform", work.num_tokens, work.num_topk, work.num_experts, seed=rank)
    x = numbered_tokens(work.num_tokens, work.hidden, dtype=work.dtype)
    given: dict[str, Any] = {"transport": work.chosen, "low_latency_mode": work.low_latency}
    if work.num_nodes > 1:
        given["ranks_per_node"] = work.num_ranks // work.num_nodes
    num_rows = 0
    with tokenyard.Buffer(group, timeout=scaled(60), **given) as buffer:
        for _ in range(3):
            got: Any = None
            out: Any = None
            if work.low_latency:
                got = buffer.low_latency_dispatch(x, idx, work.num_tokens, work.num_experts)
                y = torch.zeros(got.recv_x[0].shape, dtype=work.dtype)
                out = buffer.low_latency_combine(y, idx, weights, got.handle)
            else:
                told: Any = {"topk_idx": idx, "topk_weights": weights}
                got = buffer.dispatch(x, num_experts=work.num_experts, **told)
                num_rows = got.recv_x.shape[0]
                out = buffer.combine(got.recv_x.clone(), got.handle)
            assert out is not None
        memory = buffer.stats()["memory"]
        del memory["process"]
        return num_rows, memory


def shape(transport: str, num_tokens: int, hidden: int, **more: Any) -> Workload:
    sizes = {"num_topk": 3, "num_experts": 8, "num_ranks": 2}
    return Workload(num_tokens=num_tokens, hidden=hidden, transport=transport, **{**sizes, **more})


def shared(work: Workload, num_rows: int, *, exact: bool) -> dict[str, int]:
    found = parts(work, num_rows)
    return {one.name: one.num_bytes for one in found if one.kind == SHARED if one.is_exact == exact}


@pytest.mark.parametrize("transport", ["direct", "ring", "collective"])
@pytest.mark.parametrize(
    "num_tokens, hidden, dtype", [(64, 256, "bfloat16"), (300, 513, "float32")]
)
def test_calls_within_a_machine(transport: str, num_tokens: int, hidden: int, dtype: str) -> None:
    work = shape(transport, num_tokens, hidden, dtype=getattr(torch, dtype))
    for num_rows, memory in run_virtual(taken, 2, work, timeout=scaled(200)).results:
        want = shared(work, num_rows, exact=True)
        results = memory.pop("results", 0)
        names = {"control": "messages", "rings": "rings"}
        assert memory == {part: want.pop(name) for part, name in names.items() if name in want}
        assert 0 <= results - sum(want.values()) <= FIRST


@pytest.mark.parametrize("num_tokens, hidden", [(64, 256), (512, 1024)])
def test_calls_between_machines(num_tokens: int, hidden: int) -> None:
    work = shape("hierarchical", num_tokens, hidden, num_ranks=4, num_nodes=2)
    for num_rows, memory in run_virtual(taken, 4, work, timeout=scaled(200)).results:
        want = shared(work, num_rows, exact=True)
        assert memory["control"] == want.pop("messages")
        assert memory["staging"] <= shared(work, num_rows, exact=False)["rows with messages"]
        # Rows and sums of small calls travel with the messages, and have memory of the process.
        assert memory["results"] <= sum(want.values()) + FIRST
        assert set(memory) == {"control", "staging", "results"}


@pytest.mark.parametrize("num_tokens, hidden", [(64, 512), (33, 1024)])
def test_low_latency_calls(num_tokens: int, hidden: int) -> None:
    work = shape("direct", num_tokens, hidden, low_latency=True)
    for _, memory in run_virtual(taken, 2, work, timeout=scaled(200)).results:
        want, most = shared(work, 0, exact=True), shared(work, 0, exact=False)
        results, blocks = memory.pop("results"), want.pop("low latency: blocks sent")
        assert memory == {"control": want["messages"], "slots": want["low latency: messages"]}
        assert 0 <= results - blocks <= most["low latency: rows back"] + 2 * FIRST


def test_low_latency_results_are_those_of_the_call() -> None:
    work = shape("direct", 16, 512, low_latency=True)
    (results,) = [one for one in parts(work) if one.name == "low latency: results"]
    rows = 2 * 4 * 2 * 16 * (512 + 4 * 4)  # results, experts, ranks, tokens: FP8 and its scales
    assert results.kind == OWN
    assert rows <= results.num_bytes <= rows * 9 // 8 + 2 * FIRST


def test_rows_of_an_even_routing() -> None:
    work = shape("direct", 4000, 8, num_experts=16, num_ranks=4)
    idx, _ = routing("uniform", 4000, 3, 16)
    to_rank_0 = int((idx < 4).any(1).sum())
    assert abs(4 * to_rank_0 - work.even_rows) < 0.03 * work.even_rows  # sampled, not exact
    assert work.most_rows == 16000


def test_every_part_has_a_reason() -> None:
    for transport, nodes in (("ring", 1), ("collective", 2), ("auto", 1), ("auto", 2)):
        for low_latency in (False, True):
            work = shape(transport, 64, 256, num_nodes=nodes, low_latency=low_latency)
            found = parts(work)
            assert all(one.why and one.num_bytes >= 0 for one in found)
            assert total(found) == total(found, SHARED) + total(found, OWN)
            assert total(parts(work, work.most_rows)) >= total(found)


GIVEN = [
    "size",
    *("--tokens", "64", "--hidden", "256", "--topk", "3", "--experts", "8", "--ranks", "2"),
]


def test_the_command() -> None:
    app, runner = make_app(COMMANDS), CliRunner()
    told = json.loads(runner.invoke(app, [*GIVEN, "--json"]).stdout)
    work = shape("auto", 64, 256)
    assert told["transport"] == "direct"
    assert told["rank"] == {"even": total(parts(work)), "worst": total(parts(work, 128))}
    assert told["machine"]["even"] == 2 * told["rank"]["even"]
    said = runner.invoke(app, [*GIVEN, "--low-latency"])
    assert said.exit_code == 0
    assert "low latency: blocks sent" in said.stdout
    assert "a machine, 2 ranks" in said.stdout


@pytest.mark.parametrize(
    "options, want",
    [
        ("--topk 9", "num_topk is 9, want at most num_experts (8)"),
        ("--nodes 3", "num_nodes is 3, want a divisor of num_ranks (2)"),
        ("--tokens 0", "num_tokens is 0, want"),
        ("--dtype int8", "dtype is torch.int8, want one that combine can sum"),
        ("--dtype float33", "dtype is 'float33', want one like bfloat16"),
        ("--transport rnig", "transport is 'rnig', want one of auto, direct"),
        ("--nodes 2 --transport ring", "transport is 'ring', which serves one node"),
    ],
)
def test_mistakes(options: str, want: str) -> None:
    said = CliRunner().invoke(make_app(COMMANDS), [*GIVEN, *options.split()])
    assert said.exit_code == 2
    assert said.stderr.startswith(f"tokenyard: {want}")
    assert said.stderr.count("\n") == 1
