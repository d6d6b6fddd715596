"""megatron-core 0.16.1, as PyPI has it, on tokenyard: forward and backward over real processes."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cases.callers import fused
from tests.cases.callers import megatron as jobs
from tests.cases.callers import megatron_layer as layer_jobs
from tests.cases.callers.moe import Case, by_spec, check, whole
from tests.cases.callers.ranks import CALLERS, Callers, why_not
from tests.cases.lanes import at_night
from tests.cases.programs import run_python
from tests.cases.wrappers.compare import assert_like_one_process
from tokenyard.compat import deep_ep_path

ROOT = Path(__file__).parents[2]
NAME = "megatron-core"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(why_not(NAME)), reason=why_not(NAME) or "it is at hand"),
]

NUM_RANKS = pytest.mark.parametrize("num_ranks", at_night([2, 4], gate=(4,)))
ASYNC = {"async_finish": True}
ON_STREAM = {"async_finish": True, "allocate_on_comm_stream": True}


@NUM_RANKS
def test_fused_a2a(callers: Callers, num_ranks: int) -> None:
    ranks = callers(NAME, num_ranks)
    for dtype in (torch.bfloat16, torch.float32):
        case = Case(num_ranks=num_ranks, dtype=dtype, exact=False)
        for options in ({}, ASYNC, ON_STREAM):
            check(ranks.run(fused.exchange, fused.MEGATRON, case, options), by_spec(case))


@NUM_RANKS
def test_a_buffer_is_replaced_while_handles_wait(callers: Callers, num_ranks: int) -> None:
    case = Case(num_ranks=num_ranks, exact=False)
    cases = [replace(case, hidden=hidden, seed=n) for n, hidden in enumerate((64, 160, 416))]
    results = callers(NAME, num_ranks).run(fused.exchange_sizes, fused.MEGATRON, cases)
    assert [num_buffers for _, num_buffers in results] == [3] * num_ranks
    for n, one in enumerate(cases):
        check([outcomes[n] for outcomes, _ in results], by_spec(one))


@NUM_RANKS
def test_flex_dispatcher(callers: Callers, num_ranks: int) -> None:
    case = Case(num_ranks=num_ranks)
    for backend in ("deepep", "hybridep"):
        got = callers(NAME, num_ranks).run(jobs.dispatcher, case, backend)
        check(got, whole(case, dense=True))


def test_flex_dispatcher_with_experts_split_over_ranks(callers: Callers) -> None:
    case = Case(num_ranks=4, num_topk=2, seed=2)
    got = callers(NAME, 4).run(jobs.dispatcher, case, "deepep", 2)
    check(got, whole(case, dense=True))


@NUM_RANKS
def test_hybrid_ep(callers: Callers, num_ranks: int) -> None:
    case = Case(num_ranks=num_ranks, seed=1)
    for pad_multiple in (None, 8):
        got = callers(NAME, num_ranks).run(jobs.hybrid, case, pad_multiple)
        check(got, whole(case, dense=True))


@NUM_RANKS
def test_moe_layer_trains(callers: Callers, num_ranks: int) -> None:
    case = Case(num_ranks=num_ranks, hidden=16, num_topk=2)
    ranks = callers(NAME, num_ranks)
    alone = ranks.run(layer_jobs.train, replace(case, num_ranks=1), "")
    for backend in ("deepep", "hybridep"):
        got = ranks.run(layer_jobs.train, case, backend)
        assert_like_one_process(got, alone[0], within=1e-5)


@pytest.mark.slow
def test_the_example() -> None:
    """As a user starts it: torchrun, with the folder of `deep_ep` on PYTHONPATH."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    path = [str(deep_ep_path.folder()), str(CALLERS / NAME), os.environ.get("PYTHONPATH", "")]
    done = run_python(
        *launch,
        str(ROOT / "examples" / "megatron_moe_on_cpu.py"),
        PYTHONPATH=os.pathsep.join(path),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < 0.5 * losses[0]
