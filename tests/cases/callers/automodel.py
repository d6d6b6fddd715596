"""What ranks ask of nemo-automodel's dispatchers; imported where it is used."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.cases.callers.moe import Case, Outcome, by_expert, inputs, run


def manager(group: Any, case: Case, asynchronous: bool) -> Outcome:
    """_DeepepManager without fused permutes, which need a GPU; dense weights."""
    from nemo_automodel.components.moe.megatron.token_dispatcher import _DeepepManager

    one = _DeepepManager(
        group,
        case.num_topk,
        permute_fusion=False,
        num_experts=case.num_experts,
        num_local_experts=case.num_experts // case.num_ranks,
    )
    given = inputs(case, group.rank())

    def mixture(x: Tensor, weights: Tensor) -> Tensor:
        one.setup_metadata(len(x), weights)
        rows = one.dispatch(x, asynchronous, asynchronous)
        rows, probs = one.get_permuted_hidden_states_by_experts(rows)
        counts = one.get_number_of_tokens_per_expert()
        y = by_expert(rows, counts, case.scales_of(group.rank())) * probs[:, None]
        y = one.get_restored_hidden_states_by_experts(y)
        return one.combine(y, asynchronous, asynchronous)

    return run(given, mixture, given.dense(case.num_experts)[1])


def hybrid_manager(group: Any, case: Case) -> Outcome:
    """_HybridEPManager, which pads ranks to one number of tokens."""
    from nemo_automodel.components.moe.megatron.token_dispatcher import _HybridEPManager

    one = _HybridEPManager(
        group, case.num_experts // case.num_ranks, case.num_experts, case.num_topk
    )
    given = inputs(case, group.rank())
    chosen, weights = given.dense(case.num_experts)

    def mixture(x: Tensor, weights: Tensor) -> Tensor:
        one.setup_metadata(chosen, weights)
        rows, probs = one.get_permuted_hidden_states_by_experts(one.dispatch(x))
        counts = one.get_number_of_tokens_per_expert()
        y = by_expert(rows, counts, case.scales_of(group.rank())) * probs[:, None]
        return one.combine(one.get_restored_hidden_states_by_experts(y))

    return run(given, mixture, weights)
