"""What ranks ask of megatron-core's expert parallelism; it is imported where it is used, since the
tests' own process does not know it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.cases.callers.moe import Case, Outcome, by_expert, inputs, run


def dispatcher(group: Any, case: Case, backend: str, tensor: int = 1) -> Outcome:
    """MoEFlexTokenDispatcher, in the order in which MoELayer calls it; dense weights.

    Each expert is split over so many neighbours as `tensor` says: each of them makes its share.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    given = inputs(case, group.rank())
    chosen, weights = given.dense(case.num_experts)
    own = torch.arange(case.num_experts).chunk(case.num_ranks // tensor)[group.rank() // tensor]
    flex = MoEFlexTokenDispatcher(
        len(own), own.tolist(), config(case, backend), groups(group, tensor)
    )

    def mixture(x: Tensor, weights: Tensor) -> Tensor:
        rows, probs = flex.dispatch_preprocess(x, chosen, weights)
        rows, probs = flex.token_dispatch(rows, probs)
        rows, counts, probs = flex.dispatch_postprocess(rows, probs)
        y = by_expert(rows, counts, (own + 1) / tensor) * probs[:, None]
        y = flex.token_combine(flex.combine_preprocess(y))
        return flex.combine_postprocess(y)

    return run(given, mixture, weights)


def hybrid(group: Any, case: Case, pad_multiple: int | None) -> Outcome:
    """hybrid_ep_dispatch and hybrid_ep_combine; dense weights."""
    from megatron.core.transformer.moe.fused_a2a import hybrid_ep_combine, hybrid_ep_dispatch

    rank = group.rank()
    given = inputs(case, rank)
    chosen, weights = given.dense(case.num_experts)

    def mixture(x: Tensor, weights: Tensor) -> Tensor:
        rows, probs, _, counts, handle = hybrid_ep_dispatch(
            x, chosen, weights, group, case.num_experts // case.num_ranks, pad_multiple=pad_multiple
        )
        if pad_multiple is not None:
            assert not (counts % pad_multiple).any()
        y = by_expert(rows, counts, case.scales_of(rank)) * probs[:, None]
        return hybrid_ep_combine(y, handle, int(counts.sum()), pad_multiple)

    return run(given, mixture, weights)


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


def groups(group: Any, tensor: int = 1) -> Any:
    """Experts over all ranks, or here alone without a group; all else is of one rank. For `tensor`
    see `dispatcher`.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    def of(ranks: list[int]) -> Any:
        return dist.new_group(ranks, use_local_synchronization=True)

    rank = dist.get_rank()
    alone = of([rank])
    group = group or alone
    named = dict.fromkeys(("tp", "cp", "tp_cp", "expt_tp", "expt_dp"), alone)
    named |= dict.fromkeys(("ep", "tp_ep", "tp_dp_cp"), group)
    if tensor > 1:
        named["expt_tp"] = of([rank // tensor * tensor + n for n in range(tensor)])
        named["ep"] = of(list(range(rank % tensor, group.size(), tensor)))
    return ProcessGroupCollection(**named)
