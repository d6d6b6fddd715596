"""Experts that transformers does not run through its registry: saving, loading, refusals."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import load_file

from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tests.cases.transformers import families, family_checks, family_jobs
from tokenyard.integrations.transformers import expert_parallel
from tokenyard.testing import Processes, assert_same, run_virtual

SLOWER = ["dbrx", "diffusion_gemma", "doge", "jetmoe", "longcat_flash", "step3p7"]


@pytest.fixture(autouse=True)
def _their_warnings() -> Iterator[None]:
    """transformers' own, of imports and configs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def two_ranks(processes: Pools) -> Processes:
    return processes(2)


@pytest.mark.processes
@pytest.mark.parametrize(
    "family",
    [
        "llama4",
        "switch_transformers",
        *at_night(SLOWER),
    ],
)
def test_saving_and_loading(two_ranks: Processes, tmp_path: Path, family: str) -> None:
    """A checkpoint as of one process, and the model that comes of it."""
    whole, spread = tmp_path / "whole", tmp_path / "spread"
    families.tiny_model(family).save_pretrained(whole)
    results = two_ranks.run(family_jobs.save_and_load, family, str(spread))
    want, got = (load_file(one / "model.safetensors") for one in (whole, spread))
    assert got.keys() == want.keys()
    for name, one in want.items():
        assert_same(got[name], one)
    said, _ = family_checks.step(families.tiny_model(family), 0)
    for loaded in results:
        if isinstance(loaded, str):
            assert loaded.endswith(
                ", which does not keep its experts stacked: want "
                "expert_parallel(model_class.from_pretrained(path), group)"
            )
        else:
            torch.testing.assert_close(loaded, said, rtol=0, atol=1e-4)
    is_stacked = family not in ("dbrx", "longcat_flash", "switch_transformers")
    assert [isinstance(one, str) for one in results] == 2 * [not is_stacked]


def test_a_copy_is_spread_too() -> None:
    """A replaced forward of a copy is the copy's."""
    models = [families.tiny_model("llama4") for _ in range(2)]

    def job(group: Any) -> tuple[Any, Any]:
        model = expert_parallel(models[group.rank()], group, tokens="same")
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return family_checks.step(copied, 0)[0], family_checks.step(model, 0)[0]

    said, _ = family_checks.step(families.tiny_model("llama4"), 0)
    for of_copy, of_zeros in run_virtual(job, 2).results:
        torch.testing.assert_close(of_copy, said, rtol=0, atol=1e-4)
        assert not of_zeros.any()


def test_twice() -> None:
    model = families.tiny_model("longcat_flash")
    run_virtual(lambda group: expert_parallel(model, group), 1)
    with pytest.raises(ValueError, match="is expert parallel already"):
        run_virtual(lambda group: expert_parallel(model, group), 1)


@pytest.mark.parametrize("family", ["nllb_moe", "vitpose_backbone"])
def test_refused(family: str) -> None:
    result, words = family_checks.classify(family)
    assert result == family_checks.REFUSED
    assert "want other experts" in words


def test_nllb_moe_runs_two_experts() -> None:
    """If this fails, transformers has mended its router's mask, and NllbMoe can be supported."""
    model = families.tiny_model("nllb_moe")
    _, grads = family_checks.step(model, 0)
    used = {
        name.split("expert_")[1][0]
        for name, one in grads.items()
        if ".expert" in name and one.any()
    }
    assert model.config.num_experts == 8
    assert used <= {"0", "1"}
