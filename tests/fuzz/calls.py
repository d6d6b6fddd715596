"""The calls of a program as a user makes them, with what is wrong on one rank if it is to be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tokenyard
from tests.cases import exchange as exchange_case
from tests.cases import low_latency as low_latency_case
from tests.fuzz import elastic, hybrid, loops
from tests.fuzz.given import combine_biases, combine_rows, combine_weights, num_rows
from tests.fuzz.results import Result, Scene, later, spoil, written
from tests.fuzz.steps import (
    Cached,
    Call,
    Combine,
    CombineByExpert,
    Dispatch,
    DispatchByExpert,
    LowCombine,
    LowDispatch,
    Move,
    Open,
    Trouble,
)
from tokenyard.runtime.events import EventOverlap


def _options(step: Open, mine: Trouble | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "transport": step.transport,
        "ranks_per_node": list(step.nodes) if isinstance(step.nodes, tuple) else step.nodes,
        "low_latency_mode": step.low_latency,
        "timeout": step.timeout,
        "placement": None if step.placement is None else torch.tensor(step.placement),
    }
    if step.held is not None:
        options["placement"] = tokenyard.Replicas(step.held)
    if step.balance is not None:
        options["balance"] = step.balance or "exact"
    if mine is not None and mine.kind == "bad":
        bad = {"timeout": -1, "kernels": "nimble", "placement": torch.tensor([9]), "transport": "x"}
        options[mine.what] = bad[mine.what]
    return options


def open_buffer(group: Any, step: Open, mine: Trouble | None) -> Any:
    options = _options(step, mine)
    if step.kind == "elastic":
        return elastic.open_buffer(group, options)
    if step.kind == "hybrid":
        return hybrid.open_buffer(group, options)
    return tokenyard.Buffer(group, **options)


def placement_of(step: Move, size: int, mine: Trouble | None) -> Any:
    """Where experts go, or, of a culprit, another placement, or none at all."""
    if mine is not None and mine.kind == "bad":
        return "nowhere"
    if step.held is not None:
        return tokenyard.Replicas(step.held if mine is None else step.held[::-1])
    placement = torch.tensor(step.placement)
    return placement if mine is None else (placement + 1) % size


_MORE: dict[type, Any] = {**loops.CALLS, **elastic.CALLS, **hybrid.CALLS}


def call(
    buffer: tokenyard.Buffer,
    scene: Scene,
    step: Call,
    event: EventOverlap | None,
    mine: Trouble | None,
) -> Result:
    if mine is not None and mine.kind == "order":
        return _out_of_order(buffer, scene, step)
    if type(step) in _MORE:
        return _MORE[type(step)](buffer, scene, step, mine)
    if isinstance(step, LowDispatch):
        return _low_dispatch(buffer, scene, step, mine)
    if isinstance(step, LowCombine):
        return _low_combine(buffer, scene, step, mine)
    if isinstance(step, DispatchByExpert):
        return _dispatch_by_expert(buffer, scene, step, mine)
    if isinstance(step, CombineByExpert):
        return _combine_by_expert(buffer, scene, step, mine)
    options = {"previous_event": event, "async_finish": step.is_async}
    if isinstance(step, Combine):
        return _combine(buffer, scene, step, mine, options)
    if isinstance(step, Cached):
        return _cached(buffer, scene, step, mine, options)
    assert isinstance(step, Dispatch)
    return _dispatch(buffer, scene, step, mine, options)


def _dispatch(
    buffer: tokenyard.Buffer,
    scene: Scene,
    step: Dispatch,
    mine: Trouble | None,
    options: dict[str, Any],
) -> Result:
    case = step.case
    given = exchange_case.inputs(case, scene.place, scene.number)
    x: Any = given.x if given.scales is None else (given.x, given.scales)
    if step.x_of is not None:
        x = scene.results[step.x_of].named["x"]
    arguments = {
        "x": x,
        "topk_idx": given.topk_idx,
        "topk_weights": given.topk_weights,
        "num_experts": case.num_experts,
        "expert_alignment": case.expert_alignment,
        "num_worst_tokens": case.worst_tokens(),
        "config": tokenyard.Config(case.num_sms),
        "balanced": case.balanced,
        **options,
    }
    got = buffer.dispatch(**spoil(mine, arguments))
    handle = got.handle
    named = {
        "topk_idx": got.recv_topk_idx,
        "topk_weights": got.recv_topk_weights,
        "per_expert": got.num_recv_tokens_per_expert_list,
        "src_idx": handle.recv_src_idx,
    }
    named["x"], named["scales"] = (
        got.recv_x if isinstance(got.recv_x, tuple) else (got.recv_x, None)
    )
    if step.peek:
        fields = dict(zip(handle.v1_fields, handle))
        for name in ("rank_prefix_matrix", "recv_channel_prefix_matrix"):
            named[name] = fields.get(name)
        named["send_head"] = handle.send_head
    return Result(named, handle, later(got.event))


def _cached(
    buffer: tokenyard.Buffer,
    scene: Scene,
    step: Cached,
    mine: Trouble | None,
    options: dict[str, Any],
) -> Result:
    case = scene.program.steps[step.handle].case
    given = exchange_case.inputs(case, scene.place, scene.number)
    x: Any = given.x if given.scales is None else (given.x, given.scales)
    arguments = {"x": x, "handle": scene.results[step.handle].handle, **options}
    got = buffer.dispatch(**spoil(mine, arguments))
    recv_x, scales = got.recv_x if isinstance(got.recv_x, tuple) else (got.recv_x, None)
    return Result({"x": recv_x, "scales": scales}, None, later(got.event))


def _combine(
    buffer: tokenyard.Buffer,
    scene: Scene,
    step: Combine,
    mine: Trouble | None,
    options: dict[str, Any],
) -> Result:
    case, number, place = scene.program.steps[step.handle].case, scene.number, scene.place
    handle = scene.results[step.handle].handle
    count = num_rows(scene.program, scene.expected, step.handle, place)
    if isinstance(step.rows, int):
        x = scene.results[step.rows].named["x"]
    else:
        x = combine_rows(case, number, place, count)
        if step.rows == "buffer":
            x = written(buffer.get_next_combine_buffer(handle), x)
    biases = combine_biases(case, number, place, step.num_biases)
    arguments = {
        "x": x,
        "handle": handle,
        "topk_weights": combine_weights(case, number, place, count) if step.weights else None,
        "bias": tuple(biases) if len(biases) > 1 else next(iter(biases), None),
        **options,
    }
    got = buffer.combine(**spoil(mine, arguments))
    return Result({"x": got.x, "weights": got.topk_weights}, None, later(got.event))


def _dispatch_by_expert(
    buffer: tokenyard.Buffer, scene: Scene, step: DispatchByExpert, mine: Trouble | None
) -> Result:
    case = step.case
    given = exchange_case.inputs(case, scene.place, scene.number)
    arguments = {
        "x": given.x if given.scales is None else (given.x, given.scales),
        "topk_idx": given.topk_idx,
        "topk_weights": given.topk_weights,
        "num_experts": case.num_experts,
        "expert_alignment": case.expert_alignment,
        "balanced": case.balanced,
    }
    got = buffer.dispatch_by_expert(**spoil(mine, arguments))
    given.topk_weights.zero_()  # they are the user's again
    named = {"offsets": got.offsets, "per_expert": got.num_tokens_per_expert}
    named["x"], named["scales"] = got.x if isinstance(got.x, tuple) else (got.x, None)
    return Result(named, got.handle)


def _combine_by_expert(
    buffer: tokenyard.Buffer, scene: Scene, step: CombineByExpert, mine: Trouble | None
) -> Result:
    case, made = scene.program.steps[step.handle].case, scene.results[step.handle]
    if step.rows == "received":
        y = made.named["x"]
    else:
        rows = scene.expected[step.handle][scene.place]["x"].shape[0]
        y = combine_rows(case, scene.number, scene.place, rows)
        if step.rows == "buffer":
            y = written(buffer.get_next_combine_buffer(made.handle), y)
    out = None
    if step.given_out:
        out = torch.full((case.num_tokens(scene.place), case.hidden), 5.0, dtype=y.dtype)
    arguments = {"x": y, "handle": made.handle, "weigh": step.weigh, "out": out}
    spoilt = spoil(mine, arguments)
    return Result({"x": buffer.combine_by_expert(spoilt.pop("x"), **spoilt)})


def _low_dispatch(
    buffer: tokenyard.Buffer, scene: Scene, step: LowDispatch, mine: Trouble | None
) -> Result:
    case = step.case
    x, topk_idx, _ = low_latency_case.inputs(case, scene.place, scene.number)
    arguments = {
        "x": x,
        "topk_idx": topk_idx,
        "num_max_dispatch_tokens_per_rank": case.num_max,
        "num_experts": case.num_experts,
        **case.options,
        "async_finish": step.is_async,
        "return_recv_hook": step.hook,
    }
    got = buffer.low_latency_dispatch(**spoil(mine, arguments))
    x.fill_(77)  # it is the user's again
    recv_x, scales = got.recv_x if case.fp8[0] else (got.recv_x, None)
    slots = recv_x, scales, got.recv_count, got.handle[0], got.handle[1]
    return Result({"received": slots}, got.handle, later(got.event), got.hook)


def _low_combine(
    buffer: tokenyard.Buffer, scene: Scene, step: LowCombine, mine: Trouble | None
) -> Result:
    case, place = scene.program.steps[step.handle].case, scene.place
    _, topk_idx, weights = low_latency_case.inputs(case, place, step.handle)
    handle, sent = scene.results[step.handle].handle, scene.expected[step.handle][place]["received"]
    y = low_latency_case.experts(case, place, sent.x, sent.scales, sent.count)
    if step.zero_copy:
        y = _as_shared(buffer, handle, y)
    out = torch.full((len(topk_idx), case.hidden), 5.0, dtype=y.dtype) if step.given_out else None
    arguments = {
        "x": y,
        "topk_idx": topk_idx,
        "topk_weights": weights,
        "handle": handle,
        "zero_copy": step.zero_copy,
        "out": out,
        "async_finish": step.is_async,
        "return_recv_hook": step.hook,
    }
    got = buffer.low_latency_combine(**spoil(mine, arguments))
    if not step.zero_copy:
        y.fill_(55)
    topk_idx.fill_(0)
    return Result({"x": got.combined_x}, None, later(got.event), got.hook)


def _as_shared(buffer: tokenyard.Buffer, handle: Any, y: Tensor) -> Tensor:
    return written(buffer.get_next_low_latency_combine_buffer(handle), y)


def _out_of_order(buffer: tokenyard.Buffer, scene: Scene, step: Call) -> Result:
    """A call of the other mode, or, in the low-latency mode, of another size."""
    x, topk_idx = torch.ones(2, 128), torch.zeros(2, 1, dtype=torch.int64)
    num_experts = scene.program.opened(step.buffer).num_experts
    if isinstance(step, (LowDispatch, LowCombine)) and scene.number % 2:
        weights = torch.ones(2, 1)
        buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=num_experts)
    else:
        buffer.low_latency_dispatch(x, topk_idx, 50, num_experts)
    return Result(is_over=True)
