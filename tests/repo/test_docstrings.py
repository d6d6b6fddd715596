"""The worked examples in docstrings are run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import tokenyard
from tokenyard.kernels.base import has_triton

MODULES = [
    info.name
    for info in pkgutil.walk_packages(tokenyard.__path__, "tokenyard.")
    if has_triton() or not info.name.startswith("tokenyard.kernels.triton")
]

# Packages that the extra `dev` leaves out.
OPTIONAL = ("vllm", "mpi4py", "transformers", "accelerate", "peft")

# Rooms whose public functions must all show an example.
SHOWN = (
    "tokenyard.spec.elastic",
    "tokenyard.spec.elastic_parts",
    "tokenyard.spec.exchange",
    "tokenyard.spec.local",
    "tokenyard.spec.low_latency",
)


def test_every_module_can_be_imported_and_its_examples_hold() -> None:
    wrong = []
    for name in MODULES:
        try:
            failed: object = doctest.testmod(importlib.import_module(name)).failed
        except ModuleNotFoundError as error:
            failed = error.name not in OPTIONAL and error
        if failed:
            wrong.append(f"{name}: {failed}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", SHOWN)
def test_every_function_of_the_specification_has_an_example(name: str) -> None:
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=False)
    for test in finder.find(module):
        short = test.name.removeprefix(f"{name}.")
        is_function = short in vars(module) and callable(getattr(module, short))
        if is_function and not isinstance(getattr(module, short), type) and short[0] != "_":
            assert test.examples, f"{test.name} has no example"
