"""The workflows of GitHub name what exists, and try the versions that we promise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import pins, release, versions
from tools.versions import PASSED, Row, minor, numbers

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("workflows/*.yml")}
CI = "".join((ROOT / ".ci" / name).read_text() for name in ("run", "gate-env"))
PROJECT = (ROOT / "pyproject.toml").read_text()
TABLE = versions.read(versions.PAGE.read_text())
ENDS, BETWEEN = (
    WORKFLOWS[name]["jobs"]["versions"]["strategy"]["matrix"]["include"]
    for name in ("ci", "nightly")
)
CELLS = ENDS + BETWEEN


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Those that run here. A job that calls another workflow has no steps of its own."""
    for name, workflow in WORKFLOWS.items():
        for job, what in workflow["jobs"].items():
            if "uses" not in what:
                yield f"{name}.yml, {job}", what


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for where, job in jobs():
        for step in job["steps"]:
            yield where, step


def commands() -> Iterator[tuple[str, str]]:
    for where, step in steps():
        if "run" in step:
            yield where, step["run"]


def test_there_is_one_for_each_purpose() -> None:
    assert set(WORKFLOWS) == {"ci", "nightly", "versions", "docs", "release"}
    assert "schedule" in WORKFLOWS["nightly"][True]  # YAML reads the key `on` as a truth
    assert WORKFLOWS["release"][True]["push"] == {"tags": ["v*"]}


def test_actions_are_pinned_to_a_major_version_or_a_commit() -> None:
    pinned = r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})"
    used = [(where, step["uses"]) for where, step in steps() if "uses" in step]
    assert used
    for where, action in used:
        assert re.fullmatch(pinned, action), f"{where}: {action}"
    majors: dict[str, set[str]] = {}
    for _, action in used:
        majors.setdefault(action.split("@")[0], set()).add(action)
    assert all(len(one) == 1 for one in majors.values()), majors


def test_jobs_end_and_may_do_little() -> None:
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}, name
    for where, job in jobs():
        assert job["timeout-minutes"] <= 360, where
        assert re.fullmatch(r"ubuntu-\d\d\.04", job["runs-on"]), where
        if "write" in job.get("permissions", {}).values():
            assert where.startswith(("docs", "release")), where


def test_commands_name_what_exists() -> None:
    for where, command in commands():
        for path in re.findall(r"(?<![\w/])\.(?:ci|github)/[\w./-]+", command):
            assert (ROOT / path).exists(), f"{where}: {path}"
        for module in re.findall(r"-m (tools[\w.]*)", command):
            assert (ROOT / f"{module.replace('.', '/')}.py").exists(), f"{where}: {module}"
        for extras in re.findall(r"\.\[([\w,]+)\]", command):
            for extra in extras.split(","):
                assert re.search(rf"^{extra} = \[", PROJECT, re.MULTILINE), f"{where}: [{extra}]"


def test_both_lanes_call_the_workflow_of_versions_with_what_it_asks_for() -> None:
    asked = set(WORKFLOWS["versions"][True]["workflow_call"]["inputs"])
    for lane in ("ci", "nightly"):
        job = WORKFLOWS[lane]["jobs"]["versions"]
        assert job["uses"] == "./.github/workflows/versions.yml"
        assert job["with"] == {name: f"${{{{ matrix.{name} }}}}" for name in asked}


def test_settings_are_those_of_ci() -> None:
    told = [(where, step.get("env", {})) for where, step in steps()]
    for where, settings in told:
        for name in settings:
            assert name in CI or name in ("GH_TOKEN", "SITE_URL"), f"{where}: {name}"
    known = re.findall(r"^ *step ([\w-]+)$", CI, re.MULTILINE)
    (until,) = {settings["TOKENYARD_CI_UNTIL"] for _, settings in told if len(settings) > 1}
    assert {"unit", "multi-process"} <= set(known[: known.index(until) + 1])


def test_every_cell_of_the_matrix_has_passed_by_hand() -> None:
    for cell in CELLS:
        tried = TABLE[Row(cell["python"], cell["torch"])][minor(cell["numba"])]
        assert tried == f"{PASSED} ({cell['numba']})", cell


def test_the_matrix_has_both_ends_of_what_we_promise() -> None:
    def ends(found: set[str]) -> tuple[str, str]:
        ordered = sorted(found, key=numbers)
        return ordered[0], ordered[-1]

    promised = {row.python for row, cells in TABLE.items() if PASSED in " ".join(cells.values())}
    assert {cell["python"] for cell in CELLS} == promised
    assert {minor(cell["numba"]) for cell in CELLS} == set(versions.NUMBAS)
    torches = {row.torch for row in TABLE}
    for python in ends(promised):
        pairs = {(one["torch"], one["numba"]) for one in CELLS if one["python"] == python}
        least, most = ends(torches)
        tried = {
            row.torch
            for row, cells in TABLE.items()
            if row.python == python and PASSED in " ".join(cells.values())
        }
        assert {torch for torch, _ in pairs} == tried & {least, most}
    assert ends({cell["torch"] for cell in CELLS}) == ends(torches)
    # Pull requests wait for the oldest and the newest of all.
    for key in ("python", "torch", "numba"):
        assert tuple(cell[key] for cell in ENDS) == ends({cell[key] for cell in CELLS}), key


def test_pythons_of_the_matrix_are_classifiers() -> None:
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert classified == sorted({cell["python"] for cell in CELLS}, key=numbers)


def test_full_runs_have_the_versions_that_the_page_names() -> None:
    named = re.search(
        r"CI runs all tests .*Python ([\d.]+), torch ([\d.]+)", versions.PAGE.read_text()
    )
    assert named is not None
    full = [job for where, job in jobs() if where in ("ci.yml, gates", "nightly.yml, everything")]
    for job in full:
        (python,) = [
            step["with"]["python-version"]
            for step in job["steps"]
            if "python-version" in step.get("with", {})
        ]
        assert python == named[1]
    assert pins.read()["gate"]["torch"] == named[2]


def test_a_release_publishes_both_distributions_without_a_password() -> None:
    made = WORKFLOWS["release"]["jobs"]
    assert made["publish"]["strategy"]["matrix"]["distribution"] == list(release.PROJECTS)
    assert made["publish"]["permissions"] == {"id-token": "write"}
    text = (FOLDER / "workflows" / "release.yml").read_text()
    assert "secrets." not in text
    assert "password" not in text.split("\njobs:")[1]


def test_files_that_are_named_elsewhere_exist() -> None:
    owned = re.findall(r"^(/\S+) ", (FOLDER / "CODEOWNERS").read_text(), re.MULTILINE)
    assert owned
    updates = yaml.safe_load((FOLDER / "dependabot.yml").read_text())["updates"]
    watched = [one for update in updates for one in update.get("directories", [])]
    assert "/compat/deep_ep" in watched
    for path in [*owned, *watched]:
        assert (ROOT / path.lstrip("/")).exists(), path
