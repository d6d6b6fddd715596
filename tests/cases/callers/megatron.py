"""What ranks ask of megatron-core's expert parallelism; it is imported where it is used, since the
tests' own process does not know it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.cases.callers.moe import Case, Outcome, by_expert, inputs, on_rows, run


def fused(group: Any, case: Case, options: dict[str, bool]) -> Outcome:
    """fused_dispatch and fused_combine, and their gradients."""
    from megatron.core.transformer.moe.fused_a2a import fused_combine, fused_dispatch

    given = inputs(case, group.rank())

    def mixture(x: Tensor, weights: Tensor) -> Tensor:
        recv_x, recv_idx, recv_weights, counts, handle = fused_dispatch(
            x, given.topk_idx, weights, case.num_experts, group, **options
        )
        assert counts.tolist() == _counts(recv_idx, case.num_experts // case.num_ranks)
        y = on_rows(recv_x, recv_idx, recv_weights, case.scales_of(group.rank()))
        return fused_combine(y, group, handle, **options)[0]

    return run(given, mixture)


def fused_sizes(group: Any, cases: list[Case]) -> tuple[list[Outcome], int]:
    """Several hidden sizes forward, and only then their backward passes, in reverse. Megatron
    replaces its Buffer whenever a row is larger than any before. Also how many Buffers it made.
    """
    from megatron.core.transformer.moe import fused_a2a

    buffers, kept, leaves = [], [], []
    for case in cases:
        given = inputs(case, group.rank())
        x, weights = given.x.clone().requires_grad_(), given.topk_weights.clone().requires_grad_()
        recv_x, recv_idx, recv_weights, _, handle = fused_a2a.fused_dispatch(
            x, given.topk_idx, weights, case.num_experts, group
        )
        y = on_rows(recv_x, recv_idx, recv_weights, case.scales_of(group.rank()))
        kept.append((fused_a2a.fused_combine(y, group, handle)[0], given.grad))
        leaves.append((x, weights))
        buffers.append(fused_a2a._buffer)
    for combined, grad in reversed(kept):
        combined.backward(grad)
    outcomes = [
        Outcome(y=combined.detach(), grad_x=x.grad, grad_weights=weights.grad)
        for (combined, _), (x, weights) in zip(kept, leaves)
    ]
    return outcomes, len(set(map(id, buffers)))


def dispatcher(group: Any, case: Case, backend: str) -> Outcome:
    """MoEFlexTokenDispatcher, in the order in which MoELayer calls it; dense weights."""
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    rank = group.rank()
    given = inputs(case, rank)
    chosen, weights = given.dense(case.num_experts)
    flex = MoEFlexTokenDispatcher(
        case.num_experts // case.num_ranks,
        case.experts_of(rank).tolist(),
        config(case, backend),
        groups(group),
    )

    def mixture(x: Tensor, weights: Tensor) -> Tensor:
        rows, probs = flex.dispatch_preprocess(x, chosen, weights)
        rows, probs = flex.token_dispatch(rows, probs)
        rows, counts, probs = flex.dispatch_postprocess(rows, probs)
        y = by_expert(rows, counts, case.scales_of(rank)) * probs[:, None]
        y = flex.token_combine(flex.combine_preprocess(y))
        return flex.combine_postprocess(y)

    return run(given, mixture, weights)


def _counts(recv_idx: Tensor, num_local: int) -> list[int]:
    return [int((recv_idx == e).sum()) for e in range(num_local)]


def config(case: Case, backend: str, **more: Any) -> Any:
    """Of one layer. Without a backend, the dispatcher for which one process is enough."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    kind: dict[str, Any] = {"moe_token_dispatcher_type": "allgather"}
    if backend:
        kind = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
    return TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=1,
        num_moe_experts=case.num_experts,
        expert_model_parallel_size=case.num_ranks,
        moe_router_topk=case.num_topk,
        moe_router_dtype="fp32",
        add_bias_linear=False,
        use_cpu_initialization=True,
        **kind,
        **more,
    )


def groups(group: Any) -> Any:
    """Experts over all ranks, or here alone without a group; all else is of one rank."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    one = dict.fromkeys(("tp", "cp", "tp_cp", "expt_tp", "expt_dp"), alone)
    return ProcessGroupCollection(
        **dict.fromkeys(("ep", "tp_ep", "tp_dp_cp"), group or alone), **one
    )
