"""What ranks ask of a module `fused_a2a`: Megatron has one, and Automodel its own."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from tests.cases.callers.moe import Case, Inputs, Outcome, inputs, on_rows, run

MEGATRON = "megatron.core.transformer.moe.fused_a2a"
AUTOMODEL = "nemo_automodel.components.moe.megatron.fused_a2a"


def exchange(group: Any, module: str, case: Case, options: dict[str, bool]) -> Outcome:
    """fused_dispatch and fused_combine, and their gradients."""
    a2a: Any = importlib.import_module(module)
    given = inputs(case, group.rank())
    return run(given, lambda x, weights: _mixture(a2a, group, case, given, x, weights, options))


def exchange_sizes(group: Any, module: str, cases: list[Case]) -> tuple[list[Outcome], int]:
    """Several hidden sizes forward, and only then their backward passes, in reverse. The module
    replaces its Buffer whenever a row is larger than any before. Also how many Buffers it made.
    """
    a2a: Any = importlib.import_module(module)
    a2a._buffer = None
    buffers, kept = [], []
    for case in cases:
        given = inputs(case, group.rank())
        x, weights = given.x.clone().requires_grad_(), given.topk_weights.clone().requires_grad_()
        kept.append((_mixture(a2a, group, case, given, x, weights, {}), given.grad, x, weights))
        buffers.append(a2a._buffer)
    for y, grad, *_ in reversed(kept):
        y.backward(grad)
    outcomes = [
        Outcome(y=y.detach(), grad_x=x.grad, grad_weights=weights.grad) for y, _, x, weights in kept
    ]
    return outcomes, len(set(map(id, buffers)))


def replay(group: Any, module: str, case: Case) -> tuple[Outcome, int]:
    """As checkpointing does: a forward pass that is recorded, and one that is replayed by its
    handle and has gradients. Also how many dispatches found no record.
    """
    a2a: Any = importlib.import_module(module)
    given = inputs(case, group.rank())
    recorder = a2a.DispatchReplayRecorder()
    with a2a.dispatch_replay_scope(recorder, "record"), torch.no_grad():
        _mixture(a2a, group, case, given, given.x, given.topk_weights, {})
    with a2a.dispatch_replay_scope(recorder, "replay"):
        outcome = run(given, lambda x, weights: _mixture(a2a, group, case, given, x, weights, {}))
    return outcome, recorder.replay_misses


def _mixture(
    a2a: Any,
    group: Any,
    case: Case,
    given: Inputs,
    x: Tensor,
    weights: Tensor,
    options: dict[str, bool],
) -> Tensor:
    recv_x, recv_idx, recv_weights, counts, handle = a2a.fused_dispatch(
        x, given.topk_idx, weights, case.num_experts, group, **options
    )
    num_local = case.num_experts // case.num_ranks
    assert counts.tolist() == [int((recv_idx == e).sum()) for e in range(num_local)]
    y = on_rows(recv_x, recv_idx, recv_weights, case.scales_of(group.rank()))
    return a2a.fused_combine(y, group, handle, **options)[0]
