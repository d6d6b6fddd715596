"""Beside a package that owns `deep_ep` already: which of the two is in force.

By PYTHONPATH ours is, for one run. By wheels the one is that was installed last.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import tokenyard
from tests.cases.wheels import ROOT, Environment, build, run, write

pytest.importorskip("hatchling", reason="hatchling, which builds our wheels, is not installed")

OURS = f"2.1.0+tokenyard.{tokenyard.__version__}"
THEIRS = "9.9"
VERSION = "import deep_ep; print(deep_ep.__version__)"


@dataclass(frozen=True)
class Wheels:
    tokenyard: Path
    alias: Path
    theirs: Path  # stands for DeepEP's own


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    folder = tmp_path_factory.mktemp("wheels")
    theirs = {"deep_ep/__init__.py": f"__version__ = '{THEIRS}'\n", "deep_ep/theirs.py": ""}
    return Wheels(
        tokenyard=build(ROOT, folder / "tokenyard"),
        alias=build(ROOT / "compat" / "deep_ep", folder / "alias"),
        theirs=write(folder, "deep_ep", THEIRS, theirs),
    )


def tops(wheel: Path) -> set[str]:
    """What a wheel puts beside other packages."""
    names = zipfile.ZipFile(wheel).namelist()
    return {name.split("/")[0] for name in names if ".dist-info" not in name}


def test_tokenyards_wheel_owns_no_deep_ep(wheels: Wheels) -> None:
    assert tops(wheels.tokenyard) == {"tokenyard"}
    assert tops(wheels.alias) == {"deep_ep", "deep_ep_cpp.py"}
    folder = "tokenyard/compat/deep_ep_folder/"
    names = zipfile.ZipFile(wheels.tokenyard).namelist()
    carried = {name.removeprefix(folder) for name in names if name.startswith(folder)}
    installed = zipfile.ZipFile(wheels.alias).namelist()
    assert carried == {name for name in installed if ".dist-info" not in name}
    metadata = next(name for name in installed if name.endswith("METADATA"))
    told = zipfile.ZipFile(wheels.alias).read(metadata).decode()
    assert f"Version: {tokenyard.__version__}\n" in told
    assert f"Requires-Dist: tokenyard=={tokenyard.__version__}\n" in told


@pytest.mark.slow
def test_by_pythonpath_ours_is_in_force_for_one_run(wheels: Wheels, tmp_path: Path) -> None:
    place = Environment(tmp_path / "venv")
    place.install(wheels.tokenyard)
    with pytest.raises(AssertionError, match="No module named 'deep_ep'"):
        place.says(VERSION)
    place.install(wheels.theirs)
    assert place.says(VERSION) == THEIRS
    folder = run(place.python, "-m", "tokenyard.compat.deep_ep_path")
    assert Path(folder).is_relative_to(tmp_path)
    assert place.says(VERSION, PYTHONPATH=folder) == OURS
    # Theirs is hidden as a whole, not mixed with ours.
    hidden = "import importlib.util as u; print(u.find_spec('deep_ep.theirs'))"
    assert place.says(hidden, PYTHONPATH=folder) == "None"
    assert place.says(VERSION) == THEIRS


SPAWN = """
import importlib.util, multiprocessing

def say():
    assert importlib.util.find_spec("deep_ep").origin
    import deep_ep
    from deep_ep.utils import EventOverlap
    print(deep_ep.__version__, flush=True)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=say)
    child.start()
    child.join()
"""


@pytest.mark.slow
@pytest.mark.processes
def test_spawned_processes_find_it_too(wheels: Wheels, tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    by_path, by_wheel = Environment(tmp_path / "path"), Environment(tmp_path / "wheel")
    by_path.install(wheels.tokenyard, wheels.theirs)
    by_wheel.install(wheels.tokenyard, wheels.alias)
    folder = run(by_path.python, "-m", "tokenyard.compat.deep_ep_path")
    assert run(by_path.python, script, PYTHONPATH=folder) == OURS
    assert run(by_wheel.python, script) == OURS


@pytest.mark.slow
def test_by_wheels_the_last_one_is_in_force(wheels: Wheels, tmp_path: Path) -> None:
    """pip lets a wheel overwrite another one's files without a word."""
    place = Environment(tmp_path / "venv")
    place.install(wheels.tokenyard, wheels.theirs, wheels.alias)
    assert place.says(VERSION) == OURS
    place.install(wheels.theirs)
    assert place.says(VERSION) == THEIRS
    place.pip("uninstall", "--yes", "tokenyard-deep-ep")
    with pytest.raises(AssertionError, match="'deep_ep' has no attribute '__version__'"):
        place.says(VERSION)  # ours took what it had overwritten with it
    place.install(wheels.theirs)
    assert place.says(VERSION) == THEIRS
