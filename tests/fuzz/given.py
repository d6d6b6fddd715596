"""What the steps of a program give, and what they receive of it: the same wherever it is asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.cases import exchange as exchange_case
from tests.fuzz.routes import Case
from tests.fuzz.steps import Dispatch, Program
from tokenyard import spec
from tokenyard.testing import numbered_tokens

Named = dict[str, Any]
Expected = dict[int, list[Named]]  # by step and rank of the group


def combine_rows(case: Case, step: int, rank: int, num_rows: int) -> Tensor:
    """What the experts of a rank made, if not of what it received."""
    first = 5_000_000 + 40_000 * step + 10_000 * rank
    return numbered_tokens(num_rows, case.hidden, first=first, dtype=case.sum_dtype)


def combine_weights(case: Case, step: int, rank: int, num_rows: int) -> Tensor:
    first = 9_000_000 + 40_000 * step + 10_000 * rank
    return numbered_tokens(num_rows, case.num_topk, first=first, dtype=torch.float32)


def combine_biases(case: Case, step: int, rank: int, num_biases: int) -> list[Tensor]:
    return [
        numbered_tokens(
            case.num_tokens(rank), case.hidden, first=10_000 * (rank + 4 * n), dtype=case.sum_dtype
        )
        for n in range(step, step + num_biases)
    ]


def num_rows(program: Program, known: Expected, handle: int, rank: int) -> int:
    """Rows that a combine with a handle takes on a rank."""
    made = program.steps[handle]
    if isinstance(made, Dispatch):
        return known[handle][rank]["x"].shape[0]
    marks = [layout.is_token_in_rank[:, rank] for layout in layouts_of(made.case, handle)]
    return sum(int(one.sum()) for one in marks)


def layouts_of(case: Case, number: int) -> list[Any]:
    return [spec.layout(one, case.world) for one in case.chosen(number)]


def received_by_expert(case: Case, number: int) -> list[spec.ReceivedByExpert]:
    given = [exchange_case.inputs(case, rank, number) for rank in range(case.num_ranks)]
    return spec.dispatch_by_expert(
        [one.x for one in given],
        case.chosen(number),
        case.world,
        scales=[one.scales for one in given if one.scales is not None] or None,
        expert_alignment=case.expert_alignment,
    )
