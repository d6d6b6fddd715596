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

# Rooms whose public functions must all show an example.
SHOWN = (
    "tokenyard.spec.elastic",
    "tokenyard.spec.elastic_parts",
    "tokenyard.spec.exchange",
    "tokenyard.spec.local",
    "tokenyard.spec.low_latency",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        pytest.skip("vllm is not installed")
    result = doctest.testmod(module, optionflags=doctest.FAIL_FAST)
    assert result.failed == 0


@pytest.mark.parametrize("name", SHOWN)
def test_every_function_of_the_specification_has_an_example(name: str) -> None:
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=False)
    for test in finder.find(module):
        short = test.name.removeprefix(f"{name}.")
        is_function = short in vars(module) and callable(getattr(module, short))
        if is_function and not isinstance(getattr(module, short), type) and short[0] != "_":
            assert test.examples, f"{test.name} has no example"
