"""A HybridEPBuffer among the Buffers of a program: what ranks do with it, and what `spec` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tests.cases import exchange as exchange_case
from tests.cases.exchange import FP8
from tests.fuzz.given import Expected, Named, combine_rows
from tests.fuzz.results import Result, Scene, spoil
from tests.fuzz.routes import Case
from tests.fuzz.steps import HybridCombine, HybridDispatch, Program, Trouble
from tokenyard import spec
from tokenyard.compat.hybrid_ep import indices_to_map


def open_buffer(group: Any, options: dict[str, Any]) -> tokenyard.HybridEPBuffer:
    del options["low_latency_mode"], options["placement"]
    return tokenyard.HybridEPBuffer(group, 64, 16, 4, **options)


def _maps(case: Case, number: int, rank: int) -> tuple[Tensor, Tensor]:
    given = exchange_case.inputs(case, rank, number)
    shape = case.num_tokens(rank), case.num_experts
    routing_map, probs = indices_to_map(given.topk_idx, given.topk_weights, *shape)
    assert probs is not None
    return routing_map, probs


def _lists(case: Case, number: int) -> list[Tensor]:
    """[T, E] by rank: a token's experts, ascending, -1 where it has not chosen one."""
    every = torch.arange(case.num_experts)
    maps = [_maps(case, number, rank)[0] for rank in range(case.num_ranks)]
    return [torch.where(one, every, -1) for one in maps]


def _dispatch(buffer: Any, scene: Scene, step: HybridDispatch, mine: Trouble | None) -> Result:
    case, place = step.case, scene.place
    given = exchange_case.inputs(case, place, scene.number)
    routing_map, probs = _maps(case, _routed(scene.number, step), place)
    arguments: dict[str, Any] = {"x": given.x, "num_of_experts": case.num_experts}
    if step.handle is not None:
        arguments["handle"] = scene.results[step.handle].handle
        arguments["probs"] = probs if step.with_probs else None
    elif step.as_lists:
        arguments["topk_idx"] = given.topk_idx
        arguments["topk_weights"] = given.topk_weights if step.with_probs else None
    else:
        arguments["routing_map"] = routing_map
        arguments["probs"] = probs if step.with_probs else None
    arguments = spoil(mine, arguments)
    got = buffer.dispatch_with_permute(
        hidden=arguments.pop("x"),
        scaling_factor=given.scales,
        pad_multiple=case.expert_alignment,
        **arguments,
    )
    named = {"x": got.hidden, "scales": got.scaling_factor, "probs": got.probs}
    named["counts"] = got.tokens_per_expert
    if step.handle is not None:
        return Result(named)
    return Result(named, got.handle, reads={"unpadded": "tokens_per_expert"})


def _routed(number: int, step: HybridDispatch) -> int:
    """The step whose routing it has."""
    return number if step.handle is None else step.handle


def _combine(buffer: Any, scene: Scene, step: HybridCombine, mine: Trouble | None) -> Result:
    case, place = scene.program.steps[step.handle].case, scene.place
    num_rows = len(scene.expected[step.handle][place]["x"])
    arguments = {
        "x": combine_rows(case, scene.number, place, num_rows),
        "handle": scene.results[step.handle].handle,
        "probs": torch.arange(1.0, num_rows + 1) if step.with_probs else None,
    }
    arguments = spoil(mine, arguments)
    x, probs = buffer.combine_with_unpermute(hidden=arguments.pop("x"), **arguments)
    return Result({"x": x, "probs": probs})


def _received(case: Case, number: int, routed: int) -> list[spec.ReceivedByExpert]:
    given = [exchange_case.inputs(case, rank, number) for rank in range(case.num_ranks)]
    return spec.dispatch_by_expert(
        [one.x for one in given],
        _lists(case, routed),
        case.world,
        scales=[one.scales for one in given] if case.dtype == FP8 else None,
        expert_alignment=case.expert_alignment,
    )


def _expect_dispatch(
    program: Program, known: Expected, number: int, step: HybridDispatch
) -> list[Named]:
    case, routed = step.case, _routed(number, step)
    maps = [_maps(case, routed, rank)[1] for rank in range(case.num_ranks)]
    answers = []
    for rank, want in enumerate(_received(case, number, routed)):
        own = case.world.experts_of(rank)
        probs, unpadded = torch.zeros(len(want.x)), torch.zeros(len(own), dtype=torch.int32)
        for row, pair in enumerate(want.pairs):
            if pair is not None:
                source, token, expert = pair  # one lane an expert
                probs[row] = maps[source][token, expert]
                unpadded[own.index(expert)] += 1
        ends = want.offsets.long()
        named: Named = {"x": want.x, "counts": torch.diff(ends, prepend=torch.zeros(1).long())}
        named["probs"] = probs if step.with_probs else None
        if case.dtype == FP8:
            named["scales"] = want.scales
        if step.handle is None:
            named["unpadded"] = unpadded
        answers.append(named)
    return answers


def _expect_combine(
    program: Program, known: Expected, number: int, step: HybridCombine
) -> list[Named]:
    case = program.steps[step.handle].case
    received, lists = _received(case, step.handle, step.handle), _lists(case, step.handle)
    ys = [combine_rows(case, number, rank, len(one.x)) for rank, one in enumerate(received)]
    answers: list[Named] = [
        {"x": one} for one in spec.combine_by_expert(ys, received, lists, case.world)
    ]
    for answer, one in zip(answers, lists, strict=True):
        answer["probs"] = torch.zeros(one.shape) if step.with_probs else None
    for want in received if step.with_probs else ():
        for row, pair in enumerate(want.pairs):
            if pair is not None:
                source, token, expert = pair
                answers[source]["probs"][token, expert] = row + 1.0
    return answers


CALLS: dict[type, Callable[..., Result]] = {HybridDispatch: _dispatch, HybridCombine: _combine}
EXPECTED: dict[type, Callable[..., list[Named]]] = {
    HybridDispatch: _expect_dispatch,
    HybridCombine: _expect_combine,
}
