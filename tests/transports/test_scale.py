"""Many ranks, and the bytes that they send: no more than the layout says."""

from __future__ import annotations

import os
import re
import resource
import threading
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tests.cases.conformance import check
from tests.cases.exchange import Case, expected, inputs, job
from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tests.cases.programs import run_python
from tokenyard import spec
from tokenyard.engine.agreement import Call
from tokenyard.testing import Processes, run_virtual
from tokenyard.wire import node_blocks
from tools import scale


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_nodes", at_night([8, 16, 32], gate=(8,)))
def test_nodes_of_8_ranks(num_nodes: int) -> None:
    num_ranks = 8 * num_nodes
    case = Case(
        num_ranks=num_ranks,
        ranks_per_node=8,
        tokens=(5, 0, 9),
        num_experts=2 * num_ranks,
        num_topk=8,
        hidden=24,
    )
    run = run_virtual(job, num_ranks, case, timeout=scaled(250))
    check(case, run.results)

    # x, expert ids, weights and the token's index go out; x and weights come back, then x alone.
    out, back = 24 * 2 + 8 * 8 + 8 * 4 + 4, 24 * 2 + 8 * 4 + 24 * 2
    rows = [rows_between_ranks(case, turn) for turn in range(2)]
    assert torch.equal(run.bytes_sent["dispatch"], (rows[0] + rows[1]) * out)
    assert torch.equal(run.bytes_sent["combine"], (rows[0] + rows[1]).t() * back)
    assert torch.equal(run.bytes_sent["cached dispatch"], rows[0] * 24 * 2)


def rows_between_ranks(case: Case, turn: int) -> Tensor:
    """[R, R]: the rows that rank i sends to rank j."""
    given = [inputs(case, rank, turn).topk_idx for rank in range(case.num_ranks)]
    return torch.stack([spec.layout(one, case.world).num_tokens_per_rank for one in given]).long()


def one_expert_a_rank(group: Any, num_topk: int) -> Any:
    """Every token chooses num_topk experts of rank 0, and sends a row of 100 bytes."""
    topk_idx = torch.arange(num_topk).repeat(10, 1)
    with tokenyard.Buffer(group) as buffer:
        layout = buffer.get_dispatch_layout(topk_idx, num_experts=16 * group.size())
        got = buffer.dispatch(
            torch.ones(10, 100, dtype=torch.uint8),
            num_tokens_per_rank=layout.num_tokens_per_rank,
            is_token_in_rank=layout.is_token_in_rank,
            num_tokens_per_expert=layout.num_tokens_per_expert,
        )
        return got.num_recv_tokens_per_expert_list


@pytest.mark.parametrize("num_topk", [1, 8, 16])
def test_a_token_goes_once_to_a_rank_however_many_of_its_experts_it_chose(num_topk: int) -> None:
    run = run_virtual(one_expert_a_rank, 3, num_topk)
    assert run.results[0] == [30] * num_topk + [0] * (16 - num_topk)
    want = torch.zeros(3, 3, dtype=torch.int64)
    want[:, 0] = 10 * (100 + 4)  # and 4 bytes for the token's index
    assert torch.equal(run.bytes_sent["dispatch"], want)


def test_counts_cost_what_the_design_says() -> None:
    """A rank tells each other rank a fixed message, and what of its counts does not fit in it."""
    few, many = (Case(num_ranks=4, num_experts=e, num_sms=2) for e in (8, 800))
    for case, wide in ((few, False), (many, True)):
        sent = run_virtual(job, 4, case).bytes_sent["dispatch (notify)"]
        counts = 1 + case.num_experts // 4 + 4  # rows, experts, ranks
        room = 128 - 4 - len(Call._fields) - 12  # beside call, sizes, clock, and the offer
        assert (counts > room) is wide
        assert bool((sent == 2 * 8 * (128 + max(0, counts - room))).all())


def test_expected_is_not_trivial() -> None:
    """The conformance cases move rows that differ, and sums that are not zero."""
    outs = expected(Case(num_ranks=4))
    assert len({tuple(row) for out in outs for row in out["0 x"].tolist()}) > 10
    assert all(bool(out["0 combined"].any()) for out in outs if len(out["0 combined"]))


def sum_of_experts(group: Any) -> float:
    """A token to four ranks, and back."""
    size, rank = group.size(), group.rank()
    topk_idx = (torch.arange(4)[None] + 4 * rank) % size
    with tokenyard.Buffer(group, timeout=scaled(100)) as buffer:
        got: Any = buffer.dispatch(
            torch.full((1, 8), float(rank)),
            topk_idx=topk_idx,
            topk_weights=torch.ones(1, 4),
            num_experts=size,
        )
        return float(buffer.combine(got.recv_x, got.handle).x.sum())


@pytest.mark.parametrize("num_ranks", at_night([256, 512], gate=(256,)))
def test_many_nodes_of_8_take_seconds(num_ranks: int) -> None:
    """Of this process's own time, since how busy the machine is says nothing."""
    one = scale.measure(num_ranks, "collective")
    assert one["cpu"] < 20.0 * (num_ranks / 512) ** 2 + 5.0
    assert one["messages"]["dispatch (notify)"] == num_ranks - 1
    assert one["bytes"]["dispatch (notify)"] == scale.count(num_ranks, "collective").message_bytes
    assert 0 < one["messages"]["dispatch"] <= scale.TOKENS * scale.TOPK


@pytest.mark.timeout(300)
def test_many_ranks_agree_by_nodes() -> None:
    """Each speaks with a few nodes, so that a block goes each way between every two."""
    num_ranks, others = node_blocks.LEAST_RANKS, node_blocks.LEAST_RANKS // scale.NODE - 1
    one, most = scale.measure(num_ranks, "hierarchical"), scale.count(num_ranks, "hierarchical")
    assert one["messages"]["dispatch (notify)"] == others / scale.NODE
    assert one["bytes"]["dispatch (notify)"] * most.messages == most.message_bytes * others / 8
    assert most.messages == -(-others // scale.NODE)


@pytest.mark.slow
def test_500_ranks_of_one_node() -> None:
    assert run_virtual(sum_of_experts, 500, timeout=scaled(250)).results == [
        32.0 * rank for rank in range(500)
    ]


def waits_for_all(group: Any, together: threading.Barrier) -> float:
    """Of many ranks one runs at a time, unless it waits for something else."""
    together.wait(scaled(60))
    return sum_of_experts(group)


def test_many_ranks_may_wait_for_each_other_by_other_means() -> None:
    together = threading.Barrier(64)
    run = run_virtual(waits_for_all, 64, together, timeout=scaled(120))
    assert run.results == [32.0 * rank for rank in range(64)]


@pytest.mark.processes
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_rank_holds_as_many_connections_as_are_counted(processes: Pools, num_ranks: int) -> None:
    for transport, is_lazy in product(("collective", "hierarchical"), (False, True)):
        want = scale.count(num_ranks, transport, ranks_per_node=2).connections
        want += scale.of_group(num_ranks, is_lazy)
        held = processes(num_ranks).run(scale.sockets, transport, 2, is_lazy)
        assert held == [want] * num_ranks, (transport, is_lazy)


def open_files(group: Any, is_hard: bool) -> str:
    """Open a Buffer where 6 more files may be opened, and name what comes of it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(os.listdir("/proc/self/fd")) + 6
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most if is_hard else before[1]))
    try:
        with tokenyard.Buffer(group, transport="collective", timeout=scaled(60)):
            return "opened"
    except ValueError as error:
        return str(error)
    finally:
        if not is_hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.processes
def test_a_buffer_raises_the_limit_of_open_files(processes: Pools) -> None:
    """Gloo would end the process: 1,024 files, a usual limit, are too few for 512 ranks."""
    assert processes(4).run(open_files, False) == ["opened"] * 4
    with Processes(4, timeout=scaled(60)) as ranks:  # which cannot raise their limit again
        for said in ranks.run(open_files, True):
            assert "files are needed for connections to 3 ranks" in said
            assert "ulimit -Hn" in said


def test_docs_show_what_is_counted() -> None:
    """Rows of scale.md such as `| 512 | `collective` | 511 | 0.52 MB | 1,022 | 513 |`."""
    page = Path(__file__).parents[2] / "docs" / "internals" / "scale.md"
    row = re.compile(
        r"^\| ([\d,]+) \| `(\w+)` \| ([\d,]+) \| ([\d.]+) MB \| ([\d,]+) \| ([\d,]+) \|$", re.M
    )
    shown = row.findall(page.read_text())
    assert len(shown) == 4
    for ranks, transport, messages, size, *connections in shown:
        number = int(ranks.replace(",", ""))
        one = scale.count(number, transport)
        held = [one.connections + scale.of_group(number, lazy) for lazy in (False, True)]
        assert [f"{many:,}" for many in (one.messages, *held)] == [messages, *connections]
        assert f"{one.message_bytes / 1e6:.2f}" == size


STUCK = """
import torch, tokenyard
from tokenyard.testing import run_virtual

def job(group):
    with tokenyard.Buffer(group) as buffer:
        idx = torch.arange(group.size())[None]
        while True:
            weights = torch.ones(idx.shape)
            got = buffer.dispatch(
                torch.ones(1, 8), topk_idx=idx, topk_weights=weights, num_experts=group.size()
            )
            buffer.combine(got.recv_x, got.handle)

try:
    run_virtual(job, 60, timeout=2)
except TimeoutError as error:
    print("late:", str(error)[:20])
"""


def test_a_run_that_does_not_end_lets_the_interpreter_end() -> None:
    done = run_python("-c", STUCK)
    assert (done.stdout, done.returncode) == ("late: virtual ranks 0, 1, \n", 0), done.stderr
