"""Wheels and sdists of both distributions, as a release publishes them, and installed."""

from __future__ import annotations

import email
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import tokenyard
from tests.cases.wheels import ROOT, Environment, build, run
from tools import release

pytest.importorskip("hatchling", reason="hatchling, which builds our wheels, is not installed")
pytest.importorskip("twine", reason="twine, which checks our wheels, is not installed")
pytestmark = pytest.mark.docs

VERSION = tokenyard.__version__


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files by name, as twine finds nothing to say about them."""
    return {path.name: path for path in release.build(tmp_path_factory.mktemp("dist"))}


@pytest.fixture(scope="module")
def unpacked(made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdists")
    for name in (f"tokenyard-{VERSION}", f"tokenyard_deep_ep-{VERSION}"):
        with tarfile.open(made[f"{name}.tar.gz"]) as archive:
            archive.extractall(folder, filter="data")
    return folder


def content(wheel: Path) -> dict[str, bytes]:
    """What a wheel has; its RECORD follows from that."""
    inside = zipfile.ZipFile(wheel)
    return {name: inside.read(name) for name in inside.namelist() if not name.endswith("RECORD")}


def test_there_are_two_files_of_each(made: dict[str, Path]) -> None:
    names = (f"tokenyard-{VERSION}", f"tokenyard_deep_ep-{VERSION}")
    assert set(made) == {f"{n}{end}" for n in names for end in (".tar.gz", "-py3-none-any.whl")}


def test_a_wheel_has_the_source_and_nothing_else(made: dict[str, Path]) -> None:
    names = set(content(made[f"tokenyard-{VERSION}-py3-none-any.whl"]))
    source = ROOT / "src"
    wanted = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    found = {name for name in names if "/deep_ep_folder/" not in name and name.endswith(".py")}
    assert found == wanted
    assert "tokenyard/py.typed" in names
    assert not [name for name in names if name.endswith((".nbc", ".nbi", ".pyc", ".so"))]


def test_the_alias_asks_for_the_version_that_it_has(made: dict[str, Path]) -> None:
    inside = content(made[f"tokenyard_deep_ep-{VERSION}-py3-none-any.whl"])
    (metadata,) = [text for name, text in inside.items() if name.endswith("/METADATA")]
    told = email.message_from_bytes(metadata)
    assert told.get_all("Requires-Dist") == [f"tokenyard=={VERSION}"]


def test_no_release_has_an_alias_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    project = (release.PROJECTS["tokenyard-deep-ep"] / "pyproject.toml").read_text()
    release.check_pin(project)
    for other in ("tokenyard", f"tokenyard>={VERSION}", f"tokenyard=={VERSION}.post1"):
        with pytest.raises(release.NotReady, match="does not say"):
            release.check_pin(project.replace(f"tokenyard=={VERSION}", other))
    # The command compares too: nobody runs tests between a tag and its release.
    monkeypatch.setattr(release, "version", lambda: "9.9.9")
    monkeypatch.setattr(release, "check", lambda tag, changelog: None)
    with pytest.raises(SystemExit, match=r"does not say .*tokenyard==9\.9\.9"):
        release.main(["check", "v9.9.9"])


def test_an_sdist_can_be_tested_and_makes_the_same_wheel(
    made: dict[str, Path], unpacked: Path, tmp_path: Path
) -> None:
    whole, alias = unpacked / f"tokenyard-{VERSION}", unpacked / f"tokenyard_deep_ep-{VERSION}"
    for name in ("LICENSE", "SECURITY.md", "tools/release.py", ".ci/run", "tests/conftest.py"):
        assert (whole / name).exists(), name
    for project in (whole, alias):
        again = build(project, tmp_path / project.name)
        assert content(again) == content(made[again.name])


def test_installed_the_command_says_its_version(made: dict[str, Path], tmp_path: Path) -> None:
    place = Environment(tmp_path / "venv")
    place.install(*(path for name, path in made.items() if name.endswith(".whl")))
    command = tmp_path / "venv" / "bin" / "tokenyard"
    assert VERSION in run(command, "--version")
    where = "import tokenyard, deep_ep; print(tokenyard.__file__, deep_ep.__version__)"
    file, version = place.says(where).split()
    assert Path(file).is_relative_to(tmp_path)
    assert version == f"2.1.0+tokenyard.{VERSION}"


@pytest.mark.slow
def test_installed_from_an_index_the_extras_suffice(made: dict[str, Path], tmp_path: Path) -> None:
    """In an environment with nothing but what pip brings: needs a package index."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    wheel = made[f"tokenyard-{VERSION}-py3-none-any.whl"]
    run(python, "-m", "pip", "install", "-q", f"torch=={torch.__version__.split('+')[0]}")
    run(python, "-m", "pip", "install", "-q", f"{wheel}[cli,viz]")
    run(python, "-m", "pip", "check")
    told = json.loads(run(python.parent / "tokenyard", "doctor", "--json"))
    assert told
    first = run(python, ROOT / "examples" / "quickstart.py")
    assert "combine gave back the right sums: True" in first


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the list is that of Python 3.11")
def test_what_builds_a_release_installs_by_its_hashes() -> None:
    """Needs a package index. A list that lacks a package would only fail after the tag.

    What pip builds from source would bring packages whose hashes nobody compares: there must be a
    wheel of everything.
    """
    pip = (sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed")
    listed = ROOT / ".github" / "release.txt"
    run(*pip, "--only-binary", ":all:", "--require-hashes", "-r", listed)
