"""Models of transformers whose experts are spread: twenty steps on 2 ranks are those of one
process that holds all experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from safetensors.torch import load_file

from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tests.cases.wrappers import model as jobs
from tests.cases.wrappers.compare import Outcome, assert_like_one_process
from tests.cases.wrappers.table import MODEL, REFUSED

pytestmark = pytest.mark.processes


def run(processes: Pools, kind: str, folder: Path) -> tuple[list[Outcome], Outcome]:
    """On 2 ranks, and on one that holds all."""
    wrapper, _, rest = kind.partition("_")
    paths = [str(folder / name) for name in ("many", "one")]
    job: Any = jobs.train
    many: tuple[Any, ...]
    one: tuple[Any, ...]
    if wrapper == "accelerate":
        precision = "bf16" if rest else "no"
        job, many, one = jobs.with_accelerate, (False, precision), (True, precision)
    elif kind == "lora_accelerate":
        job, many, one = jobs.with_accelerate, (False, "no", "experts"), (True, "no", "experts")
    elif wrapper == "trainer":
        more = "both" if rest else "", rest == "accumulated"
        job, many, one = jobs.with_trainer, (False, paths[0], *more), (True, paths[1], *more)
    elif wrapper == "lora":
        lora, _, order = rest.partition("_")
        order = order or "after"
        many, one = ("ddp", lora, order, paths[0]), ("alone", lora, order, paths[1])
    else:
        many, one = (wrapper,), ("alone",)
    (alone,) = processes(1).run(job, *one)
    return processes(2).run(job, *many), alone


@pytest.mark.parametrize("kind", at_night(MODEL, gate=("trainer_lora",)))
def test_twenty_steps(processes: Pools, tmp_path: Path, kind: str) -> None:
    results, want = run(processes, kind, tmp_path)
    assert_like_one_process(results, want, MODEL[kind].within)
    if kind.startswith("trainer"):
        name = "model" if kind == "trainer" else "adapter_model"
        check_files(tmp_path, f"checkpoint-{jobs.NUM_STEPS}/{name}.safetensors")
        check_files(tmp_path, f"saved/{name}.safetensors")
    elif kind in ("lora_dense", "lora_experts_before", "lora_experts_after"):
        check_files(tmp_path, "adapter_model.safetensors")


def check_files(folder: Path, file: str) -> None:
    """What is saved is the whole model, or adapter, of one process."""
    got, want = (load_file(folder / which / file) for which in ("many", "one"))
    assert got.keys() == want.keys()
    for key, one in want.items():
        assert got[key].shape == one.shape, key
        assert (got[key] - one).abs().max() < 1e-5, key


def test_what_is_refused(processes: Pools, tmp_path: Path) -> None:
    for said in processes(2).run(jobs.told, str(tmp_path)):
        assert said.keys() == REFUSED.keys()
        for name, text in said.items():
            assert REFUSED[name].outcome in text, name
