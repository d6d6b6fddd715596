"""HybridEPBuffer equals `spec`, bit for bit, and says what is wrong with its input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.hybrid_ep import FP8, Case, check, job
from tests.cases.processes import Pools
from tokenyard.compat.hybrid_ep import indices_to_map
from tokenyard.testing import poisoned, run_virtual

CASES = {
    "plain": Case(),
    "float32": Case(dtype=torch.float32, kind="uniform"),
    "fp8": Case(dtype=FP8, pad_multiple=8),
    "padded": Case(pad_multiple=16),
    "no-probs": Case(with_probs=False),
    "lists": Case(as_lists=True, pad_multiple=4),
    "lists-no-probs": Case(as_lists=True, with_probs=False),
    "all-to-one": Case(kind="one"),
    "nobody": Case(kind="none"),
    "no-tokens": Case(tokens=(0,)),
    "room-to-spare": Case(more_rows=24, pad_multiple=8),
    "rows-dropped": Case(more_rows=-4, pad_multiple=4, kind="uniform", tokens=(9, 14)),
    "rank-0-drops": Case(more_rows=-3, rank_0_alone=True, kind="uniform", tokens=(9, 14)),
}


def run(case: Case, run_job: Any) -> None:
    num_rows = [len(one.x) for one in case.expected_rows()]
    check(case, run_job(job, case, num_rows))


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("name", CASES)
def test_virtual_ranks(name: str, num_ranks: int) -> None:
    case = replace(CASES[name], num_ranks=num_ranks)
    with poisoned():
        run(case, lambda job, *args: run_virtual(job, num_ranks, *args).results)


def test_nodes() -> None:
    case = replace(CASES["padded"], num_ranks=4, ranks_per_node=2)
    run(case, lambda job, *args: run_virtual(job, 4, *args).results)


@pytest.mark.processes
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_processes(name: str, num_ranks: int, processes: Pools) -> None:
    run(replace(CASES[name], num_ranks=num_ranks), processes(num_ranks).run)


def test_names_that_callers_read() -> None:
    def look(group: Any) -> None:
        buffer = tokenyard.HybridEPBuffer(
            group=group,
            hidden_dim=8,
            max_num_of_tokens_per_rank=3,
            num_local_experts=2,
            num_sms_dispatch_api=24,
            load_cached_kernels=True,
        )
        config = buffer.configurer.buffer_config
        assert buffer.group == group
        assert (config.hidden_dim, config.num_of_experts_per_rank) == (8, 2)
        assert config.max_num_of_tokens_per_rank >= 3
        nodes = buffer.num_of_nodes, buffer.num_of_hybrid_ep_ranks_per_nvlink_domain
        assert nodes == (1, 2)
        assert (buffer.node_rank, buffer.local_rank, buffer.group_size) == (0, group.rank(), 2)
        buffer.empty_jit_cache()
        buffer.destroy()

    run_virtual(look, 2)


LISTS = {"routing_map": None, "topk_idx": torch.zeros(3, 2).long(), "num_of_experts": 4}


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"hidden": None}, "hidden is None, want a torch.Tensor"),
        ({"routing_map": torch.ones(3, 4)}, "routing_map has dtype float32, want bool"),
        ({"routing_map": None}, "routing_map, topk_idx and handle are None, want one of them"),
        ({"probs": torch.ones(3, 5)}, r"probs has shape \[3, 5\], want \[3, 4\]"),
        ({"probs": torch.ones(3, 4).double()}, "probs has dtype float64, want float32"),
        ({"num_of_experts_per_rank": 3}, "num_of_experts_per_rank is 3, want 4 experts / 2 ranks"),
        ({"non_blocking": True}, "num_permuted_tokens is None, want a number with non_blocking"),
        ({"handle": (1, 2)}, "handle is a tuple, want one that dispatch_with_permute returned"),
        ({"pad_multiple": -1}, "pad_multiple is -1, want at least 0"),
        ({"num_permuted_tokens": torch.tensor([1, 2])}, "num_permuted_tokens"),
        *(
            ({**LISTS, **given}, message)
            for given, message in (
                ({"topk_weights": torch.ones(2, 2)}, r"topk_weights has shape \[2, 2\]"),
                ({"topk_weights": torch.ones(3, 1)}, r"topk_weights has shape \[3, 1\]"),
                ({"topk_weights": torch.ones(1, 2)}, r"topk_weights has shape \[1, 2\]"),
                ({"topk_weights": torch.ones(3, 2).long()}, "topk_weights has dtype int64"),
                ({"topk_weights": [[1.0, 1.0]] * 3}, "topk_weights is a list"),
            )
        ),
    ],
)
def test_bad_input_raises_on_all_ranks(bad: dict[str, Any], message: str) -> None:
    def dispatch(group: Any) -> None:
        buffer = tokenyard.HybridEPBuffer(group, 8, 3, 2)
        everywhere = torch.ones(3, 4, dtype=torch.bool)
        good: dict[str, Any] = {"hidden": torch.ones(3, 8), "routing_map": everywhere}
        if group.rank() == 0:
            with pytest.raises(ValueError, match=message):
                buffer.dispatch_with_permute(**{**good, **bad})
        else:
            with pytest.raises(tokenyard.PeerInputError, match=message):
                buffer.dispatch_with_permute(**good)
        got = buffer.dispatch_with_permute(**good)
        assert got.tokens_per_expert.tolist() == [6, 6]

    run_virtual(dispatch, 2)


def test_too_few_rows_are_not_dropped_unasked() -> None:
    def dispatch(group: Any) -> None:
        buffer = tokenyard.HybridEPBuffer(group, 8, 3, 2)
        everywhere = torch.ones(3, 4, dtype=torch.bool)
        with pytest.raises(ValueError, match="num_permuted_tokens is 11, want at least the 12 row"):
            buffer.dispatch_with_permute(
                hidden=torch.ones(3, 8), routing_map=everywhere, num_permuted_tokens=11
            )

    run_virtual(dispatch, 2)


def test_counts_are_the_users() -> None:
    def dispatch(group: Any) -> None:
        buffer = tokenyard.HybridEPBuffer(group, 8, 3, 2)
        x, routing_map = torch.ones(3, 8), torch.ones(3, 4, dtype=torch.bool)
        got = buffer.dispatch_with_permute(hidden=x, routing_map=routing_map)
        for _ in range(2):
            assert got.tokens_per_expert.tolist() == [6, 6]
            got.tokens_per_expert.zero_()
            got = buffer.dispatch_with_permute(hidden=x, handle=got.handle)

    run_virtual(dispatch, 2)


def test_map_of_bad_indices() -> None:
    with pytest.raises(ValueError, match=r"topk_idx\[1, 0\] is 4, want -1..3"):
        indices_to_map(torch.tensor([[0], [4]]), None, 2, 4)
