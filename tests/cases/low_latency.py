"""One case of the low-latency mode: its inputs, what a rank does with them, what `spec` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tokenyard import spec
from tokenyard.testing import assert_same, numbered_tokens, routing


@dataclass(frozen=True, kw_only=True)
class Case:
    num_ranks: int
    tokens: tuple[int, ...] = (5, 0, 8, 3)  # by rank, again and again
    num_max: int = 8
    hidden: int = 40
    num_topk: int = 3
    num_experts: int = 8
    dtype: torch.dtype = torch.bfloat16
    sum_dtype: torch.dtype | None = None
    kind: str = "holes"
    placement: tuple[int, ...] | None = None
    fp8: tuple[bool, bool, bool] = (False, False, False)  # use_fp8, round_scale, use_ue8m0
    kernels: str = "numba"
    transport: str = "auto"
    ranks_per_node: int | None = None
    zero_copy: bool = False
    logfmt: bool = False
    how: str = "now"  # or "hook" or "async"
    rounds: int = 3

    @property
    def world(self) -> spec.World:
        even = spec.World.even(self.num_experts, self.num_ranks)
        return even if self.placement is None else spec.World(self.placement, even.node_of_rank)

    @property
    def options(self) -> dict[str, Any]:
        return dict(zip(("use_fp8", "round_scale", "use_ue8m0"), self.fp8))


def inputs(case: Case, rank: int, turn: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, topk_idx and weights of a turn; tokens are numbered over all ranks."""
    num_tokens = case.tokens[(rank + turn) % len(case.tokens)]
    first = 100_000 * turn + 1000 * rank
    x = numbered_tokens(num_tokens, case.hidden, first=first, dtype=case.dtype)
    return x, *routing(case.kind, num_tokens, case.num_topk, case.num_experts, seed=first)


def experts(case: Case, rank: int, x: Tensor, scales: Tensor | None, count: Tensor) -> Tensor:
    """Expert e multiplies by e + 1, and leaves NaN in the slots that hold nothing."""
    used = torch.arange(x.shape[1]) < count[:, None]
    if scales is None:
        rows = x.double()
    else:
        rows = torch.zeros(x.shape, dtype=torch.float64)
        rows[used] = spec.cast_back(x[used], scales[used]).double()
    gain = torch.tensor([e + 1.0 for e in case.world.experts_of(rank)]).double()
    if case.logfmt:  # magnitudes on both sides of 1, so that some blocks are cast
        rows = torch.sin(rows) * 2.0 ** (-torch.arange(case.hidden) // 512 % 3)
    y = (rows * gain[:, None, None]).to(case.sum_dtype or case.dtype)
    return y.masked_fill(~used[:, :, None], float("nan"))


def job(group: Any, case: Case) -> list[list[Any]]:
    """Two dispatches, then their combines in the other order, again and again."""
    placement = None if case.placement is None else torch.tensor(case.placement)
    rank, out = group.rank(), []
    with tokenyard.Buffer(
        group,
        low_latency_mode=True,
        transport=case.transport,
        kernels=case.kernels,
        ranks_per_node=case.ranks_per_node,
        placement=placement,
    ) as buffer:
        for turn in range(case.rounds):
            first = _dispatch(buffer, case, rank, 2 * turn)
            second = _dispatch(buffer, case, rank, 2 * turn + 1)
            for answers, handle in (second, first):
                answers.append(_combine(buffer, case, rank, answers, handle))
            out += [first[0], second[0]]
            del first, second, answers
            out[-2:] = [[_copy(one) for one in answers] for answers in out[-2:]]
    return out


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _how(case: Case) -> dict[str, Any]:
    return {"async_finish": case.how == "async", "return_recv_hook": case.how == "hook"}


def _finish(case: Case, got: Any) -> None:
    assert (got.hook is not None) is (case.how == "hook")
    assert (got.event.event is not None) is (case.how == "async")
    if case.how == "hook":
        got.hook()
    if case.how == "async":
        got.event.current_stream_wait()


def _dispatch(buffer: tokenyard.Buffer, case: Case, rank: int, turn: int) -> tuple[list[Any], Any]:
    x, topk_idx, _ = inputs(case, rank, turn)
    got = buffer.low_latency_dispatch(
        x, topk_idx, case.num_max, case.num_experts, **case.options, **_how(case)
    )
    x.fill_(77)  # it is ours again
    _finish(case, got)
    src_info, layout_range, num_max, hidden, num_experts = got.handle
    assert (num_max, hidden, num_experts) == (case.num_max, case.hidden, case.num_experts)
    recv_x, scales = got.recv_x if case.fp8[0] else (got.recv_x, None)
    return [turn, recv_x, scales, got.recv_count, src_info, layout_range], got.handle


def _combine(
    buffer: tokenyard.Buffer, case: Case, rank: int, answers: list[Any], handle: Any
) -> Tensor:
    turn, recv_x, scales, count, *_ = answers
    _, topk_idx, weights = inputs(case, rank, turn)
    y = experts(case, rank, recv_x, scales, count)
    if case.zero_copy:
        y = buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
    given = torch.full((len(topk_idx), case.hidden), 5.0, dtype=y.dtype) if turn % 3 else None
    got = buffer.low_latency_combine(
        y,
        topk_idx,
        weights,
        handle,
        zero_copy=case.zero_copy,
        use_logfmt=case.logfmt,
        out=given,
        **_how(case),
    )
    if not case.zero_copy:
        y.fill_(55)
    topk_idx.fill_(0)
    _finish(case, got)
    assert given is None or got.combined_x is given
    return got.combined_x


def check(case: Case, answers: list[list[list[Any]]]) -> None:
    """Every rank's answers against the specification."""
    for place in range(2 * case.rounds):
        given = [inputs(case, rank, place) for rank in range(case.num_ranks)]
        xs, topk_idxs, weights = ([one[i] for one in given] for i in range(3))
        want = spec.low_latency_dispatch(xs, topk_idxs, case.world, case.num_max, **case.options)
        ys = [experts(case, r, one.x, one.scales, one.count) for r, one in enumerate(want)]
        sums = spec.low_latency_combine(
            ys, topk_idxs, weights, want, case.world, use_logfmt=case.logfmt
        )
        for rank, (one, total) in enumerate(zip(want, sums)):
            turn, x, scales, count, src_info, layout_range, combined = answers[rank][place]
            what = f"turn {turn} on rank {rank}: "
            assert_same(count, one.count, what + "count")
            assert_same(layout_range, one.layout_range, what + "layout_range")
            for local, rows in enumerate(count.tolist()):
                assert_same(x[local, :rows], one.x[local, :rows], what + "x")
                assert_same(src_info[local, :rows], one.src_info[local, :rows], what + "src_info")
                if one.scales is not None:
                    assert_same(scales[local, :rows], one.scales[local, :rows], what + "scales")
            assert_same(combined, total, what + "combined")
