"""Calls in slots, compiled and in steps: they refuse the same pairs, and move rows of any size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.low_latency import Case, check, job
from tokenyard.low_latency.stepwise import check_pairs, find_pairs
from tokenyard.testing import poisoned, run_virtual
from tokenyard.validate import SUMMABLE

# Compiled where ranks share memory; in steps elsewhere.
TRANSPORTS = ["direct", "collective"]
NUM_EXPERTS = 6
LONG = Case(num_ranks=2, hidden=2056, tokens=(2, 3), num_experts=7, rounds=1)
ALONE = Case(num_ranks=2, hidden=512, tokens=(1, 0), num_topk=1, num_experts=2, rounds=1)
MANY = Case(num_ranks=2, hidden=3, tokens=(140, 150), num_max=150, num_experts=7, rounds=1)


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copied", "zero-copy"])
@pytest.mark.parametrize("dtype", SUMMABLE, ids=str)
def test_long_rows(dtype: torch.dtype, zero_copy: bool) -> None:
    case = replace(LONG, dtype=dtype, zero_copy=zero_copy)
    check(case, run_virtual(job, 2, case).results)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_tokens(transport: str) -> None:
    """The memory for rows that a combine gives back grows."""
    case = replace(MANY, transport=transport)
    with poisoned():
        check(case, run_virtual(job, 2, case).results)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("packs", [False, True], ids=["plain", "packed"])
def test_a_row_that_comes_alone(transport: str, packs: bool) -> None:
    """Its scales, of 4 bytes if they are packed, lie before its experts."""
    case = replace(ALONE, kind="uniform", fp8=(True, packs, packs), transport=transport)
    check(case, run_virtual(job, 2, case).results)


def answer(call: Any, *given: Any, **options: Any) -> str:
    try:
        call(*given, **options)
    except ValueError as error:
        return str(error)
    return ""


BAD = [
    ([[0, 1, 2], [3, 4, 7]], "topk_idx[1, 2] is 7, want -1..5 (num_experts=6)"),
    ([[0, 1, 2], [-2, 4, 6]], "topk_idx[1, 0] is -2, want -1..5 (num_experts=6)"),
    ([[2**40, 1, 2], [9, 9, 9]], "topk_idx[0, 0] is 1099511627776, want -1..5 (num_experts=6)"),
    ([[0, 1, 2], [3, 5, 3]], "topk_idx[1] names expert 3 2 times, want once at most"),
    ([[4, 4, 4], [0, 1, 2]], "topk_idx[0] names expert 4 3 times, want once at most"),
    ([[-1, -1, -1], [3, -1, -1]], ""),
    ([[0, 1, 2], [0, 1, 2]], ""),
]
SENT = [[4, 1, -1], [1, 0, 5], [-1, -1, -1]]
PICKED = [
    ("as they were sent", SENT, [[0, 1, -1], [0, 1, 2], [-1, -1, -1]]),
    ("permuted", [[1, -1, 4], [5, 1, 0], [-1, -1, -1]], [[1, -1, 0], [2, 0, 1], [-1, -1, -1]]),
    ("some", [[1, -1, -1], [-1, -1, 1], [-1, -1, -1]], [[1, -1, -1], [-1, -1, 0], [-1, -1, -1]]),
    ("twice", [[4, 4, 1], [1, 1, 1], [-1, -1, -1]], [[0, 0, 1], [0, 0, 0], [-1, -1, -1]]),
]
UNSENT = [
    ([[4, 1, -1], [1, 4, 5], [-1, -1, -1]], "topk_idx[1, 1] is 4"),
    ([[4, 1, -1], [-2, 0, 5], [-1, -1, -1]], "topk_idx[1, 0] is -2"),
    ([[4, 1, -1], [1, 0, 5], [-1, 0, 0]], "topk_idx[2, 1] is 0"),
]


@pytest.mark.parametrize("idx, text", BAD)
def test_pairs_that_are_no_experts(idx: list[list[int]], text: str) -> None:
    assert answer(check_pairs, torch.tensor(idx), NUM_EXPERTS) == text


@pytest.mark.parametrize("idx, picked", [one[1:] for one in PICKED], ids=[one[0] for one in PICKED])
def test_pairs_are_found_again(idx: list[list[int]], picked: list[list[int]]) -> None:
    assert find_pairs(torch.tensor(idx), torch.tensor(SENT)).tolist() == picked


@pytest.mark.parametrize("idx, text", UNSENT)
def test_pairs_that_were_not_sent(idx: list[list[int]], text: str) -> None:
    want = f"{text}, want an expert that the token had in dispatch, or -1"
    assert answer(find_pairs, torch.tensor(idx), torch.tensor(SENT)) == want


def refuse(group: Any, transport: str) -> dict[str, list[Any]]:
    """What calls say of the same pairs; and sums of rows whose expert is known by its number."""
    told: dict[str, list[Any]] = {}
    with tokenyard.Buffer(group, transport=transport, low_latency_mode=True) as buffer:

        def send(idx: list[list[int]]) -> Any:
            x = torch.ones(len(idx), 4)
            return buffer.low_latency_dispatch(x, torch.tensor(idx), 4, NUM_EXPERTS, use_fp8=False)

        def add(idx: list[list[int]]) -> list[float]:
            got = send(SENT)
            first = buffer.rank * NUM_EXPERTS // 2
            gain = 10.0 ** torch.arange(first, first + NUM_EXPERTS // 2)
            y = torch.ones(got.recv_x.shape) * gain[:, None, None]
            topk_idx = torch.tensor(idx)
            weights = torch.ones(topk_idx.shape)
            sums = buffer.low_latency_combine(y, topk_idx, weights, got.handle).combined_x
            return sums[:, 0].tolist()

        told["bad"] = [answer(send, idx) for idx, _ in BAD]
        told["unsent"] = [answer(add, idx) for idx, _ in UNSENT]
        told["sums"] = [add(idx) for _, idx, _ in PICKED]
    return told


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_calls_refuse_the_same_pairs(transport: str) -> None:
    """All ranks give the same pairs, so each of them says what is wrong."""
    sums = [[sum(10.0**e for e in token if e >= 0) for token in idx] for _, idx, _ in PICKED]
    for rank, told in enumerate(run_virtual(refuse, 2, transport).results):
        where = f", on rank {rank}"
        bad = [text and f"low-latency dispatch: {text}{where}" for _, text in BAD]
        assert told["bad"] == bad
        unsent = [
            f"low-latency combine: {text}, want an expert that the token had in dispatch, or -1"
            + where
            for _, text in UNSENT
        ]
        assert told["unsent"] == unsent
        assert told["sums"] == sums
