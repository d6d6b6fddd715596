"""What ranks ask of torchtitan's DeepEP and HybridEP paths; imported where it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.cases.callers.moe import Case, Outcome, by_expert, inputs, run


def first(group: Any, case: Case, score_before_experts: bool) -> Outcome:
    """Version 0.2.2: V1's Buffer."""
    from torchtitan.distributed.deepep import deepep

    given = inputs(case, group.rank())

    def mixture(x: Tensor, weights: Tensor) -> Tensor:
        rows, counts, state = deepep.dispatch_tokens(
            x,
            given.topk_idx,
            weights,
            case.num_experts // case.num_ranks,
            case.num_experts,
            group,
            score_before_experts=score_before_experts,
        )
        y = deepep.combine_tokens(by_expert(rows, counts, case.scales_of(group.rank())), state)
        deepep.sync_combine()
        return y

    return run(given, mixture)


def second(group: Any, case: Case) -> tuple[Outcome, Tensor]:
    """Version 0.3.0: V2's ElasticBuffer. Training, and then the sum without gradients, for which
    rows come by expert in a shape that does not depend on the routing.
    """
    from torchtitan.distributed.deepep import deepep

    given = inputs(case, group.rank())
    most = max(Case.tokens)  # the size is rounded: torchtitan keeps a Buffer for fewer tokens
    deepep.get_buffer(
        group, hidden=case.hidden, num_max_tokens_per_rank=most, num_topk=case.num_topk
    )

    def mixture(x: Tensor, weights: Tensor) -> Tensor:
        rows, counts, state = deepep.dispatch_tokens(
            x,
            given.topk_idx,
            weights,
            case.num_experts // case.num_ranks,
            case.num_experts,
            num_tokens_per_rank=most,
            cudagraphable=True,  # where there are no gradients
        )
        y = deepep.combine_tokens(by_expert(rows, counts, case.scales_of(group.rank())), state)
        deepep.sync_combine()
        return y

    trained = run(given, mixture)
    with torch.no_grad():
        return trained, mixture(given.x, given.topk_weights)


def hybrid(group: Any, case: Case, factor: float | None, pad_multiple: int | None) -> Outcome:
    """Version 0.3.0: HybridEPBuffer."""
    from torchtitan.distributed.deepep import hybridep

    given = inputs(case, group.rank())
    num_local = case.num_experts // case.num_ranks
    hybridep.get_buffer(group, case.hidden, max(case.tokens[: case.num_ranks]), num_local)

    def mixture(x: Tensor, weights: Tensor) -> Tensor:
        rows, counts, state = hybridep.dispatch_tokens(
            x,
            given.topk_idx,
            weights,
            num_local,
            case.num_experts,
            group,
            non_blocking_expert_capacity_factor=factor,
            pad_multiple=pad_multiple,
        )
        y = by_expert(rows, counts, case.scales_of(group.rank()))
        return hybridep.combine_tokens(y, state, pad_multiple)

    return run(given, mixture)


def dispatcher(group: Any, case: Case, kind: str) -> Outcome:
    """Version 0.3.0: what its MoE module holds, for V2 or HybridEP."""
    from torch.distributed.device_mesh import DeviceMesh
    from torchtitan.models.common import token_dispatcher

    given = inputs(case, group.rank())
    made: Any = getattr(token_dispatcher, kind)
    one = made(
        made.Config(
            num_experts=case.num_experts,
            top_k=case.num_topk,
            hidden_dim=case.hidden,
            num_max_tokens_per_rank=max(Case.tokens),
        )
    )
    one.wire_meshes(ep_mesh=DeviceMesh.from_group(group, "cpu"))
    unused = torch.empty(0)  # how many tokens of this rank each expert gets

    def mixture(x: Tensor, weights: Tensor) -> Tensor:
        rows, counts, metadata = one.dispatch(x, weights, given.topk_idx, unused)
        return one.combine(by_expert(rows, counts, case.scales_of(group.rank())), metadata, x)

    return run(given, mixture)
