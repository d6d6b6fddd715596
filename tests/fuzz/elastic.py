"""An ElasticBuffer among the Buffers of a program: what ranks do with it, and what `spec` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tokenyard
from tests.cases import exchange as exchange_case
from tests.cases.elastic import FIELDS
from tests.cases.exchange import FP8
from tests.fuzz.given import Expected, Named, combine_biases, combine_rows
from tests.fuzz.results import Result, Scene, spoil
from tests.fuzz.routes import Case
from tests.fuzz.steps import ElasticCombine, ElasticDispatch, Program, Trouble
from tokenyard import spec

NUM_MAX = 48  # num_max_tokens_per_rank


def open_buffer(group: Any, options: dict[str, Any]) -> tokenyard.ElasticBuffer:
    del options["low_latency_mode"]
    return tokenyard.ElasticBuffer(group, num_max_tokens_per_rank=NUM_MAX, **options)


def _dispatch(buffer: Any, scene: Scene, step: ElasticDispatch, mine: Trouble | None) -> Result:
    case = step.case
    given = exchange_case.inputs(case, scene.place, scene.number)
    arguments: dict[str, Any] = {
        "x": given.x if given.scales is None else (given.x, given.scales),
        "topk_weights": given.topk_weights,
        "do_expand": step.do_expand,
    }
    if step.handle is not None:
        arguments["handle"] = scene.results[step.handle].handle
    else:
        arguments |= {
            "topk_idx": given.topk_idx,
            "num_experts": case.num_experts,
            "expert_alignment": case.expert_alignment,
            "do_cpu_sync": step.do_cpu_sync,
        }
    got = buffer.dispatch(**spoil(mine, arguments))
    named = {"topk_idx": got.recv_topk_idx, "topk_weights": got.recv_topk_weights}
    named["x"], named["scales"] = got.recv_x if case.dtype == FP8 else (got.recv_x, None)
    if step.handle is not None:
        return Result(named)
    for one in (given.topk_idx, given.topk_weights):  # they are the user's again
        one.zero_()
    result = Result(named, got.handle, reads={name: name for name in FIELDS})
    if scene.number % 2:  # else a copy of the handle may be the first that makes them
        result.read()
    return result


def _combine(buffer: Any, scene: Scene, step: ElasticCombine, mine: Trouble | None) -> Result:
    dispatched, place = scene.program.steps[step.handle], scene.place
    case, sent = dispatched.case, scene.expected[step.handle][place]
    biases = combine_biases(case, scene.number, place, step.num_biases)
    arguments = {
        "x": combine_rows(case, scene.number, place, len(sent["x"])),
        "handle": scene.results[step.handle].handle,
        "topk_weights": sent["topk_weights"].clone() if step.weights else None,
        "bias": tuple(biases) if len(biases) > 1 else next(iter(biases), None),
    }
    got = buffer.combine(**spoil(mine, arguments))
    return Result({"x": got.combined_x, "weights": got.combined_topk_weights})


def _received(
    case: Case, step: ElasticDispatch, number: int, routed: int
) -> list[spec.ElasticReceived]:
    """Of the tokens of one step, by the routing of another."""
    given = [exchange_case.inputs(case, rank, number) for rank in range(case.num_ranks)]
    return spec.elastic_dispatch(
        [one.x for one in given],
        case.chosen(routed),
        case.world,
        topk_weights=[one.topk_weights for one in given],
        scales=[one.scales for one in given if one.scales is not None] or None,
        num_max_tokens_per_rank=NUM_MAX,
        num_scaleup_ranks=_scaleup(case),
        expert_alignment=case.expert_alignment,
        do_expand=step.do_expand,
        do_cpu_sync=step.do_cpu_sync,
    )


def _scaleup(case: Case) -> int:
    """Ranks of a node; all, where nodes differ in size."""
    nodes = case.world.node_of_rank
    sizes = {nodes.count(node) for node in nodes}
    return sizes.pop() if len(sizes) == 1 else case.num_ranks


def _expect_dispatch(
    program: Program, known: Expected, number: int, step: ElasticDispatch
) -> list[Named]:
    routed = number if step.handle is None else step.handle
    names = ["x", "topk_idx", "topk_weights", *(FIELDS if step.handle is None else ())]
    names += ["scales"] if step.case.dtype == FP8 else []
    received = _received(step.case, step, number, routed)
    return [{name: getattr(one, name) for name in names} for one in received]


def _expect_combine(
    program: Program, known: Expected, number: int, step: ElasticCombine
) -> list[Named]:
    dispatched = program.steps[step.handle]
    case, ranks = dispatched.case, range(dispatched.case.num_ranks)
    received = _received(case, dispatched, step.handle, step.handle)
    sums = spec.elastic_combine(
        [combine_rows(case, number, rank, len(one.x)) for rank, one in enumerate(received)],
        received,
        case.chosen(step.handle),
        case.world,
        num_max_tokens_per_rank=NUM_MAX,
        do_expand=dispatched.do_expand,
        by_node=_scaleup(case) < case.num_ranks,
        biases=[combine_biases(case, number, rank, step.num_biases) for rank in ranks],
        topk_weights=[one.topk_weights for one in received] if step.weights else None,
    )
    return [{"x": x, "weights": weights} for x, weights in sums]


CALLS: dict[type, Callable[..., Result]] = {ElasticDispatch: _dispatch, ElasticCombine: _combine}
EXPECTED: dict[type, Callable[..., list[Named]]] = {
    ElasticDispatch: _expect_dispatch,
    ElasticCombine: _expect_combine,
}
