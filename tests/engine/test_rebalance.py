"""A placement that changes between calls: on all ranks, or on none."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.replicas import Case, inputs
from tokenyard import CallMismatch, PeerInputError, Replicas, nn, spec
from tokenyard.testing import assert_same, run_virtual

AFTER = ((0, 1, 5), (2, 0), (3, 4, 0), (1, 0))


def exchange(buffer: tokenyard.Buffer, case: Case, rank: int, turn: int) -> tuple[Any, ...]:
    x, topk_idx, weights, _ = inputs(case, rank, turn)
    got = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=case.num_experts)
    assert isinstance(got.recv_x, torch.Tensor)
    return (
        got.recv_x.clone(),
        got.num_recv_tokens_per_expert_list,
        buffer.combine(got.recv_x, got.handle).x,
        got.handle,
    )


def expected(case: Case, slots: tuple[tuple[int, ...], ...], turn: int) -> list[tuple[Any, ...]]:
    world = spec.ReplicaWorld(slots, case.world.node_of_rank)
    given = [inputs(case, rank, turn) for rank in range(case.num_ranks)]
    chosen = [spec.choose(one[1], rank, world) for rank, one in enumerate(given)]
    layouts = [spec.layout(one, world.physical) for one in chosen]
    got = spec.dispatch(
        [one[0] for one in given],
        layouts,
        world.physical,
        topk_idxs=chosen,
        topk_weights=[one[2] for one in given],
    )
    sums = spec.combine([one.x for one in got], layouts, world.physical)
    return [(one.x, one.num_tokens_per_expert, total) for one, total in zip(got, sums)]


def changing(group: Any, case: Case) -> list[tuple[Any, ...]]:
    """From even, to copies, to a placement without copies, and back to the first copies."""
    rank, out = group.rank(), []
    with tokenyard.Buffer(
        group, transport=case.transport, ranks_per_node=case.ranks_per_node
    ) as buffer:
        out.append(exchange(buffer, case, rank, 0))
        old = out[0][3]
        plain = torch.tensor([3, 2, 1, 0, 0, 1])
        placements: list[Replicas | torch.Tensor] = [Replicas(AFTER), plain]
        for turn, placement in enumerate(placements):
            moves = buffer.rebalance(placement)
            assert buffer.get_local_experts(6) == list(moves.after.experts_of_rank[rank])
            out.append(exchange(buffer, case, rank, turn + 1))
            with pytest.raises((ValueError, PeerInputError), match="rebalanced"):
                buffer.combine(out[0][0], old)
            with pytest.raises((ValueError, PeerInputError), match="rebalanced"):
                buffer.dispatch(inputs(case, rank, 0)[0], handle=old)
        assert buffer.replicas is None
        buffer.rebalance(Replicas(AFTER))
        out.append(exchange(buffer, case, rank, 3))
    return [one[:3] for one in out]


@pytest.mark.parametrize(
    "case",
    [
        Case(num_ranks=4, transport="direct"),
        Case(num_ranks=4, transport="ring"),
        Case(num_ranks=4, transport="collective"),
        Case(num_ranks=4, transport="hierarchical", ranks_per_node=2),
    ],
    ids=lambda case: case.transport,
)
def test_calls_follow_the_placement(case: Case) -> None:
    outs = run_virtual(changing, 4, case).results
    even, swapped = ((0, 1), (2, 3), (4,), (5,)), ((3, 4), (2, 5), (1,), (0,))
    for turn, slots in enumerate((even, AFTER, swapped, AFTER)):
        for rank, want in enumerate(expected(case, slots, turn)):
            assert_same(list(outs[rank][turn]), list(want), f"turn {turn}, rank {rank}")


def low_latency_job(group: Any, case: Case) -> list[Any]:
    rank, out = group.rank(), []
    with tokenyard.Buffer(
        group,
        low_latency_mode=True,
        transport=case.transport,
        placement=Replicas(case.world.experts_of_rank),
    ) as buffer:
        for turn in range(3):
            x, topk_idx, weights, _ = inputs(case, rank, turn)
            got: Any = buffer.low_latency_dispatch(x, topk_idx, 16, 6, use_fp8=False)
            y = torch.ones_like(got.recv_x)
            combined = buffer.low_latency_combine(y, topk_idx, weights, got.handle).combined_x
            out.append((got.recv_count.clone(), combined.clone()))
        x, topk_idx, weights, _ = inputs(case, rank, 3)
        pending: Any = buffer.low_latency_dispatch(
            x, topk_idx, 16, 6, use_fp8=False, return_recv_hook=True
        )
        buffer.rebalance(Replicas(AFTER))
        assert pending.hook is not None
        pending.hook()
        out.append((pending.recv_count.clone(), None))
        old = pending.handle
        with pytest.raises((ValueError, PeerInputError), match="rebalanced"):
            buffer.low_latency_combine(torch.ones_like(pending.recv_x), topk_idx, weights, old)
        with pytest.raises(ValueError, match="rebalanced"):
            buffer.get_next_low_latency_combine_buffer(old)
        for turn in range(4, 7):
            x, topk_idx, weights, _ = inputs(case, rank, turn)
            got = buffer.low_latency_dispatch(x, topk_idx, 16, 6, use_fp8=False)
            y = torch.ones_like(got.recv_x)
            combined = buffer.low_latency_combine(y, topk_idx, weights, got.handle).combined_x
            out.append((got.recv_count.clone(), combined.clone()))
    return out


@pytest.mark.parametrize("transport", ["direct", "collective"])
def test_low_latency_calls_follow_the_placement(transport: str) -> None:
    case = Case(num_ranks=4, transport=transport)
    outs = run_virtual(low_latency_job, 4, case).results
    for turn in range(7):
        slots = case.world.experts_of_rank if turn < 4 else AFTER
        world = spec.ReplicaWorld(slots, case.world.node_of_rank)
        given = [inputs(case, rank, turn) for rank in range(4)]
        chosen = [spec.choose(one[1], rank, world) for rank, one in enumerate(given)]
        xs, weights = [one[0] for one in given], [one[2] for one in given]
        want = spec.low_latency_dispatch(xs, chosen, world.physical, 16)
        ys = [torch.ones_like(one.x) for one in want]
        sums = spec.low_latency_combine(ys, chosen, weights, want, world.physical)
        for rank, one in enumerate(want):
            count, combined = outs[rank][turn]
            assert_same(count, one.count, f"turn {turn}, rank {rank}: counts")
            if combined is not None:
                assert_same(combined, sums[rank], f"turn {turn}, rank {rank}: sums")


def differing(group: Any) -> str:
    rank, case = group.rank(), Case(num_ranks=4)
    with tokenyard.Buffer(group, placement=Replicas(AFTER)) as buffer:
        before = exchange(buffer, case, rank, 0)
        other = (*AFTER[:3], (1, 2))
        with pytest.raises(CallMismatch) as raised:
            buffer.rebalance(Replicas(other if rank == 2 else AFTER))
        bad = Replicas([[0], [1], [2], [3]]) if rank == 1 else Replicas(AFTER)
        with pytest.raises((ValueError, PeerInputError), match="4 experts on 4 ranks, want 6"):
            buffer.rebalance(bad)
        with pytest.raises((ValueError, PeerInputError), match="slots of 2 ranks, want 4"):
            buffer.rebalance(Replicas([[0, 1, 2, 3], [4, 5]]))
        again = exchange(buffer, case, rank, 0)
        assert_same(list(again[:3]), list(before[:3]), f"rank {rank}: nothing has changed")
        return str(raised.value)


def test_ranks_that_differ_raise_on_all_and_change_nothing() -> None:
    texts = run_virtual(differing, 4).results
    for text in texts:
        assert text.startswith("rebalance: ranks differ in the placement")


def test_elastic_buffers_take_no_copies() -> None:
    def job(group: Any) -> None:
        copies: Any = Replicas([[0], [0, 1]])
        with pytest.raises(ValueError, match="ElasticBuffer knows no copies"):
            tokenyard.ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=16, placement=copies)

    run_virtual(job, 2)


def test_a_balance_takes_no_copies_later_either() -> None:
    """The words of the Buffer that was to be made with them, on all ranks; nothing changes."""

    def job(group: Any) -> None:
        rank, words = group.rank(), "a Buffer has a balance, want neither low_latency_mode nor"
        with tokenyard.Buffer(group, balance="exact") as buffer:
            layer = nn.MoE(buffer, 8, 8, nn.RouterConfig(num_experts=4, num_topk=2))
            for move in (buffer.rebalance, partial(nn.rebalance, layer)):
                with pytest.raises(ValueError, match=words):
                    move(Replicas([[1, 0], [3, 2]]))
            assert buffer.get_local_experts(4) == [[0, 1], [2, 3]][rank]
            buffer.rebalance(torch.tensor([1, 0, 1, 0]))
            assert buffer.get_local_experts(4) == [[1, 3], [0, 2]][rank]

    run_virtual(job, 2)


def test_bad_experts_and_layouts_are_named() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(
            group, placement=Replicas([[0, 1], [1, 2]]), low_latency_mode=True
        ) as buffer:
            x, weights = torch.ones(2, 8), torch.ones(2, 1)
            bad, good = torch.tensor([[0], [3]]), torch.tensor([[0], [2]])
            both = (ValueError, PeerInputError)
            with pytest.raises(both, match=r"topk_idx\[1, 0\] is 3, want -1\.\.2"):
                buffer.dispatch(x, topk_idx=bad, topk_weights=weights, num_experts=3)
            with pytest.raises(both, match=r"topk_idx\[1, 0\] is 3, want -1\.\.2"):
                buffer.low_latency_dispatch(x, bad, 4, 3, use_fp8=False)
            with pytest.raises(both, match="num_experts is 4, want 3"):
                buffer.dispatch(x, topk_idx=good, topk_weights=weights, num_experts=4)
            layout = buffer.get_dispatch_layout(good, 3)
            with pytest.raises(both, match="has 3 entries, want 4, one a copy"):
                buffer.dispatch(
                    x,
                    num_tokens_per_rank=layout.num_tokens_per_rank,
                    is_token_in_rank=layout.is_token_in_rank,
                    num_tokens_per_expert=layout.num_tokens_per_expert[:3],
                    topk_idx=good,
                    topk_weights=weights,
                )
            assert buffer.all_gather(x).x.shape == (4, 8)

    run_virtual(job, 2)
