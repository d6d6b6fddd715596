"""What .ci/run installs: exact versions, all of them, within what pyproject.toml allows."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

from tools import pins

SECTIONS = pins.read()


def test_every_requirement_has_a_version_that_fits() -> None:
    wanted = [Requirement(line) for line in requires("tokenyard")]
    wanted = [one for one in wanted if one.name != "tokenyard"]  # an extra that has others
    assert {"torch", "numba", "hatchling", "transformers"} <= {one.name for one in wanted}
    pinned = SECTIONS["mpi openmpi"] | SECTIONS["gate"]
    for one in wanted:
        version = pinned[pins.normal(one.name)]
        assert one.specifier.contains(version), f"{one}, and {version}"


@pytest.mark.parametrize("section", SECTIONS)
def test_versions_are_exact_and_in_order(section: str) -> None:
    listed = SECTIONS[section]
    assert listed
    for name, version in listed.items():
        assert name == pins.normal(name)
        assert re.fullmatch(r"[\w.]+", version), f"{name}=={version}"
    if section in pins.MADE:
        assert list(listed) == sorted(listed)
        assert {"pip", "pytest", "hatchling", "editables"} <= listed.keys()
        assert listed["torch"] == SECTIONS["gate"]["torch"]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_script_prints_what_is_read_here(section: str) -> None:
    script = pins.ROOT / ".ci" / "pins"
    told = subprocess.run([script, section], capture_output=True, text=True, check=True).stdout
    assert told.split() == [f"{name}=={version}" for name, version in SECTIONS[section].items()]


def test_differences_are_named() -> None:
    pinned, found = {"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "3"}
    assert pins.compare(pinned, found) == ["b 1 -> 2", "c 1 -> gone", "d new -> 3"]
