"""Models with nn.MoE under wrappers: twenty steps on 2 ranks are those of one process."""

from __future__ import annotations

from functools import cache

import pytest

from tests.cases.clock import scaled
from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tests.cases.wrappers import layer as jobs
from tests.cases.wrappers import pipeline as pipeline_jobs
from tests.cases.wrappers.compare import Outcome, assert_like_one_process
from tests.cases.wrappers.table import COMPILED, LAYER, PIPELINE, REFUSED_LAYER
from tokenyard.testing import run_virtual

pytestmark = pytest.mark.processes


@cache
def one_process(kind: str = "none") -> Outcome:
    return run_virtual(jobs.train, 1, kind).results[0]


@pytest.mark.parametrize("kind", at_night(LAYER, gate=("fsdp_layers",)))
def test_twenty_steps(processes: Pools, kind: str) -> None:
    if kind == "fsdp_bfloat16":  # one process rounds as well
        (want,) = processes(1).run(jobs.train, kind)
    else:
        want = one_process("no_sync" if kind == "ddp_no_sync" else "none")
    results = processes(2).run(jobs.train, kind)
    assert_like_one_process(results, want, LAYER[kind].within)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: "-".join(map(str, case)))
def test_twenty_compiled_steps(processes: Pools, case: tuple[str, int, str]) -> None:
    want = run_virtual(jobs.train_growing, 1).results[0]
    results = processes(2).run(
        jobs.train_compiled, *case, timeout=scaled(800)
    )  # inductor starts compilers
    assert_like_one_process(results, want, COMPILED[case].within)


@pytest.mark.parametrize("kind", at_night(jobs.REFUSED, gate=("ddp", "fsdp_compiled", "zero")))
def test_wrappers_that_take_experts_are_refused(processes: Pools, kind: str) -> None:
    """On all ranks, and before any expert has changed."""
    for said, far in processes(2).run(jobs.refused, kind):
        assert REFUSED_LAYER[kind].outcome in said
        assert far == 0.0


@pytest.mark.parametrize("case", at_night(PIPELINE), ids="-".join)
def test_twenty_steps_in_stages(processes: Pools, case: tuple[str, str]) -> None:
    (want_losses, want) = run_virtual(pipeline_jobs.alone, 1).results[0]
    stages = processes(4).run(pipeline_jobs.train, *case)
    for number, of_stage in enumerate((stages[:2], stages[2:])):
        named = {name: one for name, one in want.items() if name.startswith(f"{number}.")}
        losses = want_losses if number == 1 else []  # of the last stage alone
        assert_like_one_process(of_stage, (losses, named), PIPELINE[case].within)
