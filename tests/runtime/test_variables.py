"""Variables of the environment: which count as set, and what is said of wrong ones."""

from __future__ import annotations

import pytest

from tokenyard.runtime import variables


@pytest.mark.parametrize("name", [*variables.OURS, *variables.OTHERS])
def test_one_that_is_set_and_empty_is_not_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    unset = variables.read(name), variables.is_set(name)
    monkeypatch.setenv(name, "")
    assert (variables.read(name), variables.is_set(name)) == unset
    monkeypatch.setenv(name, "7")
    assert (variables.read(name), variables.is_set(name)) == ("7", True)
    assert variables.number(name) == 7


@pytest.mark.parametrize("wrong", ["four", "-1", "2.5", "1"])
def test_what_is_no_number_names_the_variable(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", wrong)
    with pytest.raises(ValueError, match=f"WORLD_SIZE is '{wrong}', want a whole number of at le"):
        variables.number("WORLD_SIZE", at_least=2)
