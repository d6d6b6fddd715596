"""The conformance cases by name, and the comparison of what ranks got with `spec`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.cases.exchange import FP8, Case, expected
from tests.cases.lanes import at_night
from tokenyard.testing import assert_same

BASE = Case(num_ranks=0)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "reference-kernels": {"kernels": "reference"},
    "float64": {"dtype": torch.float64, "num_biases": 1},
    "float32": {"dtype": torch.float32, "num_biases": 2},
    "float16-odd-hidden": {"dtype": torch.float16, "hidden": 37},
    "bfloat16-hidden-1": {"hidden": 1},
    "fp8": {"dtype": FP8, "hidden": 128},
    "fp8-odd-hidden": {"dtype": FP8, "hidden": 33},
    "long-rows": {"hidden": 1029, "num_biases": 2},
    "top-1": {"num_topk": 1},
    "top-16": {"num_topk": 16, "num_experts": 64},
    "no-tokens-on-some": {"tokens": (0, 9)},
    "no-tokens-at-all": {"tokens": (0,)},
    "all-to-one-expert": {"kind": "one"},
    "nobody": {"kind": "none"},
    "holes": {"kind": "holes", "num_biases": 1},
    "skewed": {"kind": "skewed"},
    "experts-not-divisible": {"num_experts": 13, "num_topk": 4},
    "fewer-experts-than-ranks": {"num_experts": 3, "num_topk": 2},
    "strided": {"strided": True},
    "alignment": {"expert_alignment": 16},
    "worst-tokens": {"worst": True},
    "one-channel": {"num_sms": 2},
    "two-a-node": {"ranks_per_node": 2, "num_biases": 2},
    "three-a-node-float16": {"ranks_per_node": 3, "dtype": torch.float16, "kernels": "reference"},
}


_ALWAYS = (
    "plain",
    "fp8-odd-hidden",
    "no-tokens-on-some",
    "holes",
    "experts-not-divisible",
    "worst-tokens",
    "two-a-node",
)


SAMPLED = at_night(CASES, gate=_ALWAYS)  # for numbers of ranks that lie between others
FEW = at_night(CASES, gate=("plain", "holes"))  # for many ranks


def case_of(name: str, num_ranks: int) -> Case:
    case = replace(BASE, num_ranks=num_ranks, **CASES[name])
    if isinstance(case.ranks_per_node, int):  # a node has no more ranks than there are
        case = replace(case, ranks_per_node=min(case.ranks_per_node, num_ranks))
    return case


def check(case: Case, outs: list[dict]) -> None:
    for rank, (got, want) in enumerate(zip(outs, expected(case), strict=True)):
        assert got.keys() == want.keys()
        for name in want:
            assert_same(*_valid(case, name, got[name], want[name]), f"rank {rank}: {name}")


def _valid(case: Case, name: str, got: object, want: object) -> tuple[object, object]:
    """With num_worst_tokens rows follow that nobody sent: cut them off, and look at their marks."""
    rowwise = name.split()[-1] in ("x", "scales", "topk_idx", "topk_weights", "src_idx")
    if case.worst and rowwise and isinstance(want, Tensor):
        assert isinstance(got, Tensor)
        assert got.shape[0] == case.worst_tokens()
        tail = got[want.shape[0] :]
        mark = -1 if name.split()[-1] in ("topk_idx", "src_idx") else 0
        assert bool((tail.float() == mark).all())
        got = got[: want.shape[0]]
    return got, want


def on_nodes(name: str, sizes: tuple[int, ...]) -> Case:
    case = case_of(name, sum(sizes))
    return replace(case, ranks_per_node=sizes, transport="hierarchical", kernels="numba")


def name_of(sizes: tuple[int, ...]) -> str:
    return "+".join(map(str, sizes))
