"""Every family of transformers that has MoE layers, against the table in the docs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.cases.processes import Pools
from tests.cases.transformers import families, family_checks, family_table

SIX = ["diffusion_gemma", "gpt_oss", "llama4", "longcat_flash", "muse_spark", "switch_transformers"]


@pytest.fixture(autouse=True)
def _their_warnings() -> Iterator[None]:
    """transformers' own, of imports and configs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_walk_finds_what_the_table_has() -> None:
    """If not, transformers was updated: run `python -m tests.cases.transformers.family_table`."""
    assert families.walk() == family_table.experts()


@pytest.mark.parametrize("family", SIX)
def test_six_families(family: str) -> None:
    assert family_checks.classify(family) == (family_checks.WORKS, "")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("family", families.walk())
def test_families(processes: Pools, family: str) -> None:
    models = [families.tiny_model(family, kind) for kind in families.classes_of(family)]
    kinds = {type(module).__name__ for model in models for module in model.modules()}
    assert kinds.issuperset(families.walk()[family]), "experts that no model of the table has"
    assert family_table.row_of(family, processes(2)) == family_table.rows()[family]
