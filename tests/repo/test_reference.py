"""Every public name is in docs/reference, and says what it is."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tokenyard
from tokenyard import nn, testing

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
LISTED = {
    name
    for page in FOLDER.glob("*.md")
    for name in re.findall(r"^::: (tokenyard\S+)$", page.read_text(), re.MULTILINE)
}
# Shown as one of another name, or not documented for itself.
ELSEWHERE = {"tokenyard.__version__", "tokenyard.runtime.copies.Once"}  # Once: no calls of its own
# Defined in files that kernels are compiled from: a docstring there makes all of them cold.
PLAIN = {"Config.num_channels"}


def public() -> Iterator[str]:
    for module in (tokenyard, nn, testing):
        for name in module.__all__:
            yield f"{module.__name__}.{name}"


def resolve(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def test_every_public_name_is_in_the_reference() -> None:
    assert set(public()) - LISTED - ELSEWHERE == set()


def test_what_a_class_inherits_is_in_the_reference_too() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    for name in public():
        if inspect.isclass(kind := resolve(name)):
            bases = {f"{base.__module__}.{base.__name__}" for base in kind.__mro__[1:]}
            ours = {base for base in bases if base.startswith("tokenyard.")}
            shown = {resolve(one) for one in LISTED if one[-1] != "_"}
            for base in ours - ELSEWHERE:
                if not base.rpartition(".")[2].startswith("_"):
                    assert resolve(base) in shown, f"{name} has calls of {base}"


@pytest.mark.parametrize("name", sorted(LISTED))
def test_a_name_of_the_reference_exists_and_has_a_docstring(name: str) -> None:
    if name.startswith("tokenyard.integrations"):
        pytest.importorskip("transformers", reason="transformers is not installed")
        pytest.importorskip("accelerate", reason="accelerate is not installed")
    if name == "tokenyard.nn.functional":
        found = nn.functional
    else:
        found = resolve(name)
    if inspect.isclass(found):
        members = {f"{found.__name__}.{one}": value for one, value in vars(found).items()}
        for one, value in members.items():
            plain = getattr(value, "__func__", getattr(value, "fget", value))
            if inspect.isfunction(plain) and "._" not in one and one not in PLAIN:
                assert plain.__doc__, f"{one} has no docstring"
    if callable(found):
        text = found.__doc__ or ""
        assert text, f"{name} has no docstring"
        assert not text.startswith(f"{name.rpartition('.')[2]}("), f"{name}: made by a dataclass"


def test_every_page_is_listed_in_the_index() -> None:
    index = (FOLDER / "index.md").read_text()
    for page in FOLDER.glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in index


def test_docstrings_become_markdown() -> None:
    pytest.importorskip("griffe", reason="the extra `docs` is not installed")
    from tools.site_docstrings import fenced, tabled

    example = fenced("One more.\n>>> 1 + 1\n2\n\nThat is all.")
    assert example == "One more.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nThat is all."
    columns = "Both:\n\n    x     rows,\n          [T, D]\n    y, z  sums\n\nNo more."
    table = "| | |\n|---|---|\n| `x` | rows, [T, D] |\n| `y, z` | sums |"
    assert tabled(columns) == f"Both:\n\n{table}\n\nNo more."
    long = "    a  one\n    much_longer\n       two"
    assert tabled(long).splitlines()[2:] == ["| `a` | one |", "| `much_longer` | two |"]
    for other in ("    with event:\n        do()", "    if x:  # why\n        y = 1", "two  words"):
        assert tabled(other) == other
