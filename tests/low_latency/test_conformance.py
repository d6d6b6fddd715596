"""The low-latency mode against `spec`, on every exchange and kernel set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases.kernel_sets import FOR_CPUS
from tests.cases.lanes import at_night
from tests.cases.low_latency import Case, check, job
from tests.cases.processes import Pools
from tokenyard.testing import Processes, poisoned, run_virtual

FP8, ROUND, UE8M0 = (True, False, False), (True, True, False), (True, True, True)

SHAPES = {
    "plain": Case(num_ranks=3),
    "one-rank": Case(num_ranks=1),
    "one-token-of-one-expert": Case(num_ranks=2, tokens=(1, 0), num_max=1, num_topk=1),
    "full": Case(num_ranks=2, tokens=(8,), kind="uniform"),
    "all-to-one-expert": Case(num_ranks=3, tokens=(8,), kind="one"),
    "all-unrouted": Case(num_ranks=2, kind="none"),
    "no-tokens-anywhere": Case(num_ranks=2, tokens=(0,)),
    "uneven-experts": Case(num_ranks=3, num_experts=7, placement=(2, 0, 2, 2, 0, 1, 2)),
    "a-rank-without-experts": Case(num_ranks=3, num_experts=3, placement=(0, 2, 0)),
    "experts-not-divisible": Case(num_ranks=3, num_experts=10, num_topk=10, kind="uniform"),
    "odd-hidden": Case(num_ranks=2, hidden=33),
    "hidden-1": Case(num_ranks=2, hidden=1),
    "float64": Case(num_ranks=2, dtype=torch.float64),
    "float32": Case(num_ranks=2, dtype=torch.float32),
    "float16": Case(num_ranks=2, dtype=torch.float16),
    "bytes-there-bfloat16-back": Case(
        num_ranks=2, dtype=torch.float8_e5m2, sum_dtype=torch.bfloat16
    ),
    "fp8": Case(num_ranks=3, hidden=256, fp8=FP8),
    "fp8-rounded": Case(num_ranks=2, hidden=128, fp8=ROUND, dtype=torch.float32),
    "logfmt": Case(num_ranks=3, hidden=512, num_experts=6, logfmt=True),
    "logfmt-long": Case(num_ranks=2, hidden=3072, tokens=(3, 1), logfmt=True),
    "fp8-packed": Case(num_ranks=2, hidden=1024, fp8=UE8M0, dtype=torch.float16),
}
HOWS: dict[str, dict[str, Any]] = {
    "hook": {"how": "hook"},
    "async": {"how": "async"},
    "zero-copy": {"zero_copy": True},
    "logfmt-hook": {"logfmt": True, "hidden": 1536, "how": "hook"},
    "logfmt-async": {"logfmt": True, "hidden": 512, "how": "async"},
    "zero-copy-hook": {"zero_copy": True, "how": "hook"},
}


@pytest.mark.parametrize("kernel_set", FOR_CPUS)
@pytest.mark.parametrize("shape", SHAPES)
def test_virtual(shape: str, kernel_set: str) -> None:
    case = Case(**{**vars(SHAPES[shape]), "kernels": kernel_set})
    with poisoned():
        check(case, run_virtual(job, case.num_ranks, case).results)


@pytest.mark.parametrize("how", HOWS)
def test_virtual_halves(how: str) -> None:
    case = Case(num_ranks=4, **HOWS[how])
    check(case, run_virtual(job, 4, case).results)


@pytest.fixture
def ranks(processes: Pools) -> Processes:
    return processes(3)


@pytest.mark.processes
@pytest.mark.parametrize("shape", [name for name, case in SHAPES.items() if case.num_ranks == 3])
def test_shapes(ranks: Processes, shape: str) -> None:
    check(SHAPES[shape], ranks.run(job, SHAPES[shape]))


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["direct", "ring", "collective"])
@pytest.mark.parametrize("how", HOWS)
def test_halves(ranks: Processes, how: str, transport: str) -> None:
    case = Case(num_ranks=3, transport=transport, **HOWS[how])
    check(case, ranks.run(job, case))


@pytest.mark.processes
@pytest.mark.parametrize("how", ["now", "hook", "async"])
def test_several_nodes(ranks: Processes, how: str) -> None:
    """Rank 2 alone on its node."""
    case = Case(num_ranks=3, transport="hierarchical", ranks_per_node=2, how=how)
    check(case, ranks.run(job, case))


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "num_ranks",
    at_night([1, 2, 4, 5, 8], gate=(5,)),
)
def test_ranks_and_batches(num_ranks: int, processes: Pools) -> None:
    """1 to 8 processes, 1 to 128 tokens, bfloat16 and FP8, in shared memory."""
    for tokens, fp8 in ((1, FP8), (7, UE8M0), (128, Case.fp8), (128, FP8)):
        case = Case(
            num_ranks=num_ranks,
            tokens=(tokens, tokens, tokens // 2),
            num_max=128,
            hidden=512,
            num_topk=2,
            num_experts=2 * num_ranks + 3,
            fp8=fp8,
            rounds=1,
        )
        check(case, processes(num_ranks).run(job, case))
