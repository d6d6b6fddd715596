"""Prepared exchanges, those of layers, and all_gather: what ranks do, and what `spec` says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.cases import exchange as exchange_case
from tests.cases.surroundings import AROUND, Surrounded
from tests.fuzz.given import Expected, Named, combine_rows, layouts_of, received_by_expert
from tests.fuzz.results import Result, Scene, spoil
from tests.fuzz.routes import Case
from tests.fuzz.steps import (
    Gather,
    GatherBack,
    Prepare,
    PreparedCombine,
    PreparedDispatch,
    Program,
    Through,
    Trouble,
)
from tokenyard import spec
from tokenyard.nn import functional


def _prepare(buffer: Any, scene: Scene, step: Prepare, mine: Trouble | None) -> Result:
    case = step.case
    most = case.num_tokens(scene.place) if step.by_expert else max(case.tokens)
    prepared = buffer.prepare(
        max_tokens=max(1, most),
        hidden=case.hidden,
        num_topk=case.num_topk,
        num_experts=case.num_experts,
        dtype=case.dtype,
        by_expert=step.by_expert,
        expert_alignment=case.expert_alignment,
    )
    return Result(handle=prepared)


def _surrounded(prepared: Any, around: str) -> Any:
    return Surrounded(prepared, AROUND[around]) if around else prepared


def _dispatch(buffer: Any, scene: Scene, step: PreparedDispatch, mine: Trouble | None) -> Result:
    made = scene.program.steps[step.of]
    given = exchange_case.inputs(step.case, scene.place, scene.number)
    arguments = {"x": given.x, "topk_idx": given.topk_idx, "topk_weights": given.topk_weights}
    arguments = spoil(mine, {**arguments, "num_experts": step.case.num_experts})
    del arguments["num_experts"]
    prepared = _surrounded(scene.results[step.of].handle, step.around)
    rows = prepared.dispatch(**arguments)
    for one in (given.x, given.topk_idx, given.topk_weights):  # they are the user's again
        one.zero_()
    named = {"x": rows.x, "per_expert": lambda: rows.num_tokens_per_expert}
    for name in ("offsets",) if made.by_expert else ("topk_idx", "topk_weights"):
        named[name] = lambda name=name: getattr(rows, name)
    return Result(named)


def _combine(buffer: Any, scene: Scene, step: PreparedCombine, mine: Trouble | None) -> Result:
    dispatched = scene.program.steps[step.of]
    case, place = dispatched.case, scene.place
    y = scene.results[step.of].named["x"]
    if step.rows == "own":
        y = combine_rows(case, scene.number, place, len(scene.expected[step.of][place]["x"]))
    out = torch.full((case.num_tokens(place), case.hidden), 5.0, dtype=case.dtype)
    arguments = spoil(mine, {"x": y, "out": out if step.given_out else None})
    prepared = _surrounded(scene.results[dispatched.of].handle, step.around)
    sums = prepared.combine(arguments["x"], weigh=step.weigh, out=arguments["out"])
    return Result({"x": sums})


def _through(buffer: Any, scene: Scene, step: Through, mine: Trouble | None) -> Result:
    case = step.case
    given = exchange_case.inputs(case, scene.place, scene.number)
    arguments: dict[str, Any] = {
        "x": given.x,
        "topk_idx": given.topk_idx,
        "topk_weights": given.topk_weights,
        "num_experts": case.num_experts,
    }
    arguments = spoil(mine, arguments)
    named: Named = {}

    def experts(x: Tensor, offsets: Tensor) -> Tensor:
        named.update({"x": x, "offsets": offsets})
        return combine_rows(case, scene.number, scene.place, len(x))

    with torch.no_grad(), AROUND[step.around]():
        if not step.parts:
            named["sums"] = functional.through_experts(buffer, **arguments, experts=experts)
            return Result(named)
        more: Any = {"expert_alignment": case.expert_alignment, "balanced": case.balanced}
        rows = functional.dispatch_by_expert(buffer, **arguments, **more)
        y = experts(rows.x, rows.offsets)
        rows.topk_weights.fill_(7.0)
        rows.row_of.fill_(1 << 40)
        named["sums"] = functional.combine_by_expert(buffer, y, rows)
        return Result(named)


def _gather(buffer: Any, scene: Scene, step: Gather, mine: Trouble | None) -> Result:
    x = exchange_case.inputs(step.case, scene.place, scene.number).x
    handle = None if step.handle is None else scene.results[step.handle].handle
    got = buffer.all_gather(**spoil(mine, {"x": x, "handle": handle}))
    return Result({"x": got.x}, got.handle)


def _gather_back(buffer: Any, scene: Scene, step: GatherBack, mine: Trouble | None) -> Result:
    case = scene.program.steps[step.handle].case
    y = combine_rows(case, scene.number, scene.place, sum(case.tokens))
    arguments = {"x": y, "handle": scene.results[step.handle].handle}
    return Result({"x": buffer.combine(**spoil(mine, arguments)).x})


def _expect_dispatch(
    program: Program, known: Expected, number: int, step: PreparedDispatch
) -> list[Named]:
    case = step.case
    if program.steps[step.of].by_expert:
        return _by_expert(case, number)
    given = [exchange_case.inputs(case, rank, number) for rank in range(case.num_ranks)]
    received = spec.dispatch(
        [one.x for one in given],
        layouts_of(case, number),
        case.world,
        topk_idxs=case.chosen(number),
        topk_weights=[one.topk_weights for one in given],
        expert_alignment=case.expert_alignment,
    )
    return [
        {
            "x": one.x,
            "topk_idx": one.topk_idx,
            "topk_weights": one.topk_weights,
            "per_expert": one.num_tokens_per_expert,
        }
        for one in received
    ]


def _by_expert(case: Case, number: int) -> list[Named]:
    return [
        {
            "x": one.x,
            "offsets": one.offsets,
            "per_expert": [e - b for b, e in pairwise([0, *one.offsets.tolist()])],
        }
        for one in received_by_expert(case, number)
    ]


def _sums_by_expert(case: Case, number: int, ys: list[Tensor], weigh: bool) -> list[Tensor]:
    given = [exchange_case.inputs(case, rank, number) for rank in range(case.num_ranks)]
    return spec.combine_by_expert(
        ys,
        received_by_expert(case, number),
        case.chosen(number),
        case.world,
        topk_weights=[one.topk_weights for one in given] if weigh else None,
    )


def _expect_combine(
    program: Program, known: Expected, number: int, step: PreparedCombine
) -> list[Named]:
    dispatched = program.steps[step.of]
    case = dispatched.case
    ys = [one["x"] for one in known[step.of]]
    if step.rows == "own":
        ys = [combine_rows(case, number, rank, len(y)) for rank, y in enumerate(ys)]
    if program.steps[dispatched.of].by_expert:
        sums = _sums_by_expert(case, step.of, ys, step.weigh)
    else:
        sums = spec.combine(ys, layouts_of(case, step.of), case.world)
    return [{"x": one} for one in sums]


def _expect_through(program: Program, known: Expected, number: int, step: Through) -> list[Named]:
    case, answers = step.case, _by_expert(step.case, number)
    ys = [combine_rows(case, number, rank, len(one["x"])) for rank, one in enumerate(answers)]
    for answer, sums in zip(answers, _sums_by_expert(case, number, ys, True), strict=True):
        del answer["per_expert"]
        answer["sums"] = sums
    return answers


def _expect_gather(program: Program, known: Expected, number: int, step: Gather) -> list[Named]:
    ranks = range(step.case.num_ranks)
    whole = torch.cat([exchange_case.inputs(step.case, rank, number).x for rank in ranks])
    return [{"x": whole} for _ in ranks]


def _expect_gather_back(
    program: Program, known: Expected, number: int, step: GatherBack
) -> list[Named]:
    """As of a dispatch in which every token chose every rank."""
    case = program.steps[step.handle].case
    ranks, rows = range(case.num_ranks), sum(case.tokens)
    world = spec.World(tuple(ranks), case.world.node_of_rank)
    chosen = [torch.arange(case.num_ranks).repeat(case.num_tokens(rank), 1) for rank in ranks]
    ys = [combine_rows(case, number, rank, rows) for rank in ranks]
    sums = spec.combine(ys, [spec.layout(one, world) for one in chosen], world)
    return [{"x": one} for one in sums]


CALLS: dict[type, Callable[..., Result]] = {
    Prepare: _prepare,
    PreparedDispatch: _dispatch,
    PreparedCombine: _combine,
    Through: _through,
    Gather: _gather,
    GatherBack: _gather_back,
}
EXPECTED: dict[type, Callable[..., list[Named]]] = {
    PreparedDispatch: _expect_dispatch,
    PreparedCombine: _expect_combine,
    Through: _expect_through,
    Gather: _expect_gather,
    GatherBack: _expect_gather_back,
}
