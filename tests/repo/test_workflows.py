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

# The copies of these repositories that we can read are older than the versions in use, so we could
# not look up their commits. Pin them, and take them out of here, once somebody can.
NOT_PINNED = {"actions/configure-pages@v6", "pypa/gh-action-pypi-publish@release/v1"}


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


def test_actions_are_pinned_to_a_commit_and_say_its_version() -> None:
    """Whoever takes over a repository can move its tags, but not its commits."""
    written = [
        found
        for path in FOLDER.glob("workflows/*.yml")
        for found in re.findall(r"^ *(?:- )?uses: (\S+)(.*)$", path.read_text(), re.MULTILINE)
        if not found[0].startswith("./")
    ]
    # YAML has no comments, so the above reads text; it must have seen all that YAML sees.
    used = [step["uses"] for _, step in steps() if "uses" in step]
    assert used
    assert sorted(action for action, _ in written) == sorted(used)
    forms: dict[str, set[tuple[str, str]]] = {}
    for action, comment in written:
        forms.setdefault(action.split("@")[0], set()).add((action, comment))
        if action not in NOT_PINNED:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
            # Dependabot changes a comment that ends with the version.
            assert re.fullmatch(r"  # v\d+\.\d+\.\d+", comment), f"{action}{comment}"
    assert all(len(one) == 1 for one in forms.values()), forms
    assert set(used) >= NOT_PINNED, "an exception that nobody needs any more"


def test_a_job_that_may_sign_runs_only_actions_and_asks_no_other_index() -> None:
    """Whatever runs beside the right to sign can use it."""
    signing = set()
    for name, workflow in WORKFLOWS.items():
        for job, what in workflow["jobs"].items():
            if "id-token" not in what.get("permissions", {}):
                continue
            signing.add(f"{name}.yml, {job}")
            assert not [step for step in what["steps"] if "run" in step], (name, job)
            for place in (workflow, what, *what["steps"]):
                assert not [one for one in place.get("env", {}) if "PIP" in one], (name, job)
    assert signing == {"docs.yml, publish", "release.yml, attest", "release.yml, publish"}


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
            others = ("GH_TOKEN", "PIP_EXTRA_INDEX_URL", "SITE_URL")
            assert name in CI or name in others, f"{where}: {name}"
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


def test_a_release_is_built_attested_and_published_in_this_order() -> None:
    made = WORKFLOWS["release"]["jobs"]
    assert made["attest"]["needs"] == "build"
    assert made["publish"]["needs"] == "attest"
    assert made["announce"]["needs"] == "publish"
    assert made["build"]["permissions"] == {"contents": "read"}
    assert made["attest"]["permissions"] == {"id-token": "write", "attestations": "write"}
    # Each later job has the files where `build` left them.
    (kept,) = [step["with"] for step in made["build"]["steps"] if "upload-" in step.get("uses", "")]
    assert kept["path"].split() == ["dist", "sbom.cdx.json"]
    for job in ("attest", "publish", "announce"):
        uses = [step for step in made[job]["steps"] if "download-" in step.get("uses", "")]
        assert [step["with"] for step in uses] == [{"name": kept["name"]}], job
    attested = [step["with"] for step in made["attest"]["steps"] if "attest@" in step["uses"]]
    assert [one["subject-path"] for one in attested] == ["dist/*/*"] * 2
    assert [one.get("sbom-path") for one in attested] == [None, "sbom.cdx.json"]


def test_only_the_list_of_parts_asks_another_index_in_a_release() -> None:
    workflow = WORKFLOWS["release"]
    made = workflow["jobs"].values()
    asking = [
        place.get("run")
        for place in (workflow, *made, *(step for job in made for step in job["steps"]))
        if "PIP_EXTRA_INDEX_URL" in place.get("env", {})
    ]
    assert asking == ["python -m tools.release sbom dist sbom.cdx.json"]


def test_what_builds_a_release_is_installed_by_its_hashes() -> None:
    installs = [
        command
        for where, command in commands()
        if where.startswith("release") and "install" in command
    ]
    assert installs == ["pip install --require-hashes -r .github/release.txt"]
    head, listed = (FOLDER / "release.txt").read_text().split("\n", 1)
    assert head.startswith("# What .github/workflows/release.yml installs")
    # A name, its version, its hashes, and who asked for it: no index, no address.
    entry = r"[\w-]+==[\w.]+(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n(?:    #.*\n)+"
    assert re.fullmatch(f"(?:{entry})+", listed)
    assert "://" not in listed
    asked = (FOLDER / "release.in").read_text().splitlines()
    pinned = [line for line in asked if not line.startswith("#")]
    assert {line.split("==")[0] for line in pinned} == {"cyclonedx-bom", "hatchling", "twine"}
    for line in pinned:
        assert f"\n{line} \\\n" in f"\n{listed}", line


def test_files_that_are_named_elsewhere_exist() -> None:
    owned = re.findall(r"^(/\S+) ", (FOLDER / "CODEOWNERS").read_text(), re.MULTILINE)
    assert owned
    updates = yaml.safe_load((FOLDER / "dependabot.yml").read_text())["updates"]
    watched = [one for update in updates for one in update.get("directories", [])]
    assert "/compat/deep_ep" in watched
    for path in [*owned, *watched]:
        assert (ROOT / path.lstrip("/")).exists(), path
