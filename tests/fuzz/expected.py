"""What every call of a program gives on every rank, from `spec`, which sees all ranks at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.cases import exchange as exchange_case
from tests.cases import low_latency as low_latency_case
from tests.fuzz import elastic, hybrid, loops
from tests.fuzz.given import (
    Expected,
    Named,
    combine_biases,
    combine_rows,
    combine_weights,
    layouts_of,
    num_rows,
    received_by_expert,
)
from tests.fuzz.routes import Case
from tests.fuzz.steps import (
    Cached,
    Combine,
    CombineByExpert,
    Dispatch,
    DispatchByExpert,
    LowCombine,
    LowDispatch,
    Program,
)
from tokenyard import spec


def expect(program: Program) -> Expected:
    makers: dict[type, Callable[..., Any]] = {
        Dispatch: _dispatch,
        Cached: _cached,
        Combine: _combine,
        DispatchByExpert: _dispatch_by_expert,
        CombineByExpert: _combine_by_expert,
        LowDispatch: _low_dispatch,
        LowCombine: _low_combine,
        **loops.EXPECTED,
        **elastic.EXPECTED,
        **hybrid.EXPECTED,
    }
    expected: Expected = {}
    for number, step in enumerate(program.steps):
        if type(step) in makers:
            expected[number] = makers[type(step)](program, expected, number, step)
    return expected


def _dispatch(program: Program, known: Expected, number: int, step: Dispatch) -> list[Named]:
    case, ranks = step.case, range(step.case.num_ranks)
    given = [exchange_case.inputs(case, rank, number) for rank in ranks]
    xs = [one.x for one in given]
    if step.x_of is not None:
        xs = [one["x"] for one in known[step.x_of]]
    chosen, layouts = case.chosen(number), layouts_of(case, number)
    received = spec.dispatch(
        xs,
        layouts,
        case.world,
        topk_idxs=chosen,
        topk_weights=[one.topk_weights for one in given],
        scales=[one.scales for one in given] if case.dtype == exchange_case.FP8 else None,
        expert_alignment=case.expert_alignment,
    )
    notices = spec.notify(layouts, max(1, case.num_sms // 2)) if step.peek else None
    answers = []
    for rank, got in enumerate(received):
        named: Named = {
            "x": _padded(case, got.x, 0),
            "topk_idx": _padded(case, got.topk_idx, -1),
            "topk_weights": _padded(case, got.topk_weights, 0),
            "src_idx": _padded(case, got.src_idx, -1),
            "per_expert": [] if case.worst else got.num_tokens_per_expert,
        }
        if got.scales is not None:
            named["scales"] = _padded(case, got.scales, 0)
        if notices is not None:
            named["send_head"] = notices[rank].send_head
            for name in ("rank_prefix_matrix", "recv_channel_prefix_matrix"):
                one_node = case.world.num_nodes == 1
                named[name] = getattr(notices[rank], name) if one_node else None
        answers.append(named)
    return answers


def _padded(case: Case, rows: Tensor, mark: int) -> Tensor:
    """With num_worst_tokens rows of zeros, or ids of -1, follow those that were sent."""
    if not case.worst:
        return rows
    shape = case.worst_tokens() - rows.shape[0], *rows.shape[1:]
    return torch.cat([rows, torch.full(shape, mark).to(rows.dtype)])


def _case(program: Program, step: Cached | Combine | CombineByExpert) -> Case:
    made = program.steps[step.handle]
    assert isinstance(made, (Dispatch, DispatchByExpert))
    return made.case


def _cached(program: Program, known: Expected, number: int, step: Cached) -> list[Named]:
    case = _case(program, step)
    given = [exchange_case.inputs(case, rank, number) for rank in range(case.num_ranks)]
    fp8 = case.dtype == exchange_case.FP8
    received = spec.dispatch(
        [one.x for one in given],
        layouts_of(case, step.handle),
        case.world,
        scales=[one.scales for one in given] if fp8 else None,
    )
    return [
        {"x": _padded(case, one.x, 0), **({"scales": _padded(case, one.scales, 0)} if fp8 else {})}
        for one in received
    ]


def _combine(program: Program, known: Expected, number: int, step: Combine) -> list[Named]:
    case, ranks = _case(program, step), range(_case(program, step).num_ranks)
    rows = [num_rows(program, known, step.handle, rank) for rank in ranks]
    layouts = layouts_of(case, step.handle)
    ys = [combine_rows(case, number, rank, rows[rank]) for rank in ranks]
    if isinstance(step.rows, int):
        ys = [one["x"] for one in known[step.rows]]
    biases = [combine_biases(case, number, rank, step.num_biases) for rank in ranks]
    sums = spec.combine(ys, layouts, case.world, biases=biases)
    answers: list[Named] = [{"x": one} for one in sums]
    if step.weights:
        given = [combine_weights(case, number, rank, rows[rank]) for rank in ranks]
        for answer, weights in zip(answers, spec.combine(given, layouts, case.world)):
            answer["weights"] = weights
    return answers


def _dispatch_by_expert(
    program: Program, known: Expected, number: int, step: DispatchByExpert
) -> list[Named]:
    answers: list[Named] = []
    for got in received_by_expert(step.case, number):
        ends = [0, *got.offsets.tolist()]
        named: Named = {"x": got.x, "offsets": got.offsets}
        named["per_expert"] = [end - begin for begin, end in pairwise(ends)]
        if got.scales is not None:
            named["scales"] = got.scales
        answers.append(named)
    return answers


def _combine_by_expert(
    program: Program, known: Expected, number: int, step: CombineByExpert
) -> list[Named]:
    case, received = _case(program, step), known[step.handle]
    given = [exchange_case.inputs(case, rank, step.handle) for rank in range(case.num_ranks)]
    ys = [one["x"] for one in received]
    if step.rows != "received":
        ys = [combine_rows(case, number, rank, len(y)) for rank, y in enumerate(ys)]
    sums = spec.combine_by_expert(
        ys,
        received_by_expert(case, step.handle),
        case.chosen(step.handle),
        case.world,
        topk_weights=[one.topk_weights for one in given] if step.weigh else None,
    )
    return [{"x": one} for one in sums]


def _low_dispatch(program: Program, known: Expected, number: int, step: LowDispatch) -> list[Named]:
    case = step.case
    given = [low_latency_case.inputs(case, rank, number) for rank in range(case.num_ranks)]
    got = spec.low_latency_dispatch(
        [one[0] for one in given],
        case.chosen(number),
        case.world,
        case.num_max,
        **case.options,
    )
    return [{"received": one} for one in got]


def _low_combine(program: Program, known: Expected, number: int, step: LowCombine) -> list[Named]:
    made = program.steps[step.handle]
    assert isinstance(made, LowDispatch)
    case, received = made.case, [one["received"] for one in known[step.handle]]
    given = [low_latency_case.inputs(case, rank, step.handle) for rank in range(case.num_ranks)]
    ys = [
        low_latency_case.experts(case, rank, one.x, one.scales, one.count)
        for rank, one in enumerate(received)
    ]
    sums = spec.low_latency_combine(
        ys, case.chosen(step.handle), [one[2] for one in given], received, case.world
    )
    return [{"x": one} for one in sums]
