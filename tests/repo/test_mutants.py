"""Faults that can be planted, and what finds them, on a tree of one module and one test."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases.clock import scaled
from tools import mutants
from tools.faults import FAULTS, copies
from tools.faults.copies import Copy
from tools.faults.fault import Fault
from tools.faults.stages import Stage, file_of, stages_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tokenyard"
STAGE = Stage(("tests/test_toy.py",), "not slow")

MODULE = """def double(number):
    return 2 * number


def wait(number):
    while number > 0:
        number -= 1
"""
TESTS = """from tokenyard import toy


def test_double():
    assert toy.double(3) == 6


def test_wait():
    toy.wait(3)
"""


def test_names_are_unique() -> None:
    assert len(FAULTS) >= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_faults_have_a_place_and_can_be_read() -> None:
    for fault in FAULTS:
        text = (SOURCE / fault.path).read_text()
        faulty = fault.plant(text)
        assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(text)), fault.name


def test_there_are_tests_for_their_files() -> None:
    for fault in FAULTS:
        stages = stages_of(fault)
        assert stages, fault.path
        missing = [
            one for stage in stages for one in stage.paths if not (ROOT / file_of(one)).exists()
        ]
        assert not missing, f"{fault.path}: no {missing}"


def test_a_file_without_tests_is_named() -> None:
    with pytest.raises(ValueError, match="no tests are known for nowhere/here"):
        stages_of(replace(FAULTS[0], path="nowhere/here"))


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., Copy]:
    tree = tmp_path / "tree"
    for name, text in {"src/tokenyard/toy.py": MODULE, "tests/test_toy.py": TESTS}.items():
        (tree / name).parent.mkdir(parents=True)
        (tree / name).write_text(text)
    (tree / "src/tokenyard/__init__.py").touch()
    markers = '[tool.pytest.ini_options]\nmarkers = ["slow"]\n'
    (tree / "pyproject.toml").write_text(markers)
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)

    def copy(limit: float = 60) -> Copy:
        made = Copy(tree, tmp_path / "copy", scaled(limit), workers=0)
        made.check()
        return made

    return copy


def planted(old: str, new: str) -> Fault:
    return Fault("a-fault", "toy", "toy.py", old, new)


def test_a_fault_is_caught(toy: Any) -> None:
    copy = toy()
    found = mutants.hunt(copy, planted("2 * number", "3 * number"), [STAGE])
    assert (found.result, found.test) == ("failed", "tests/test_toy.py::test_double")
    assert (copy.folder / "src/tokenyard/toy.py").read_text() == MODULE


@pytest.mark.slow
def test_a_test_that_fails_once_is_told(toy: Any) -> None:
    copy = toy()
    first = "import pathlib\n\n\ndef test_first():\n    place = pathlib.Path('was-here')\n"
    first += "    came = place.exists()\n    place.touch()\n    assert came\n"
    (copy.folder / "tests/test_toy.py").write_text(first)
    found = mutants.hunt(copy, planted("2 * number", "3 * number"), [STAGE])
    assert found.survived
    assert found.notes == ["tests/test_toy.py::test_first failed at the first try only"]


def test_a_fault_survives(toy: Any) -> None:
    found = mutants.hunt(toy(), planted("number > 0", "number >= 0"), [STAGE])
    assert found.survived
    assert mutants.table([found])[1].split() == ["toy", "1", "0", "a-fault"]


@pytest.mark.slow
def test_a_test_that_never_ends_has_found_a_fault(toy: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(copies, "TEST_LIMIT", scaled(1))
    found = mutants.hunt(toy(), planted("number -= 1", "number += 1"), [STAGE])
    assert found.result == "hung"


@pytest.mark.slow
def test_a_stage_that_never_ends_is_ended(toy: Any) -> None:
    begin = time.monotonic()
    script = "import time; print('begun', flush=True); time.sleep(1000)"
    status, said = toy(limit=2)._run([sys.executable, "-c", script], {})
    assert (status, said) == (None, "begun\n")
    assert time.monotonic() - begin < scaled(60)


@pytest.mark.slow
def test_a_test_that_fails_anyway_has_found_nothing(toy: Any) -> None:
    copy = toy()
    tests = copy.folder / "tests/test_toy.py"
    tests.write_text(TESTS.replace("== 6", "== 7"))
    found = mutants.hunt(copy, planted("2 * number", "3 * number"), [STAGE])
    assert found.survived
    assert found.notes == ["tests/test_toy.py::test_double failed without the fault too"]


def test_a_fault_without_a_place_says_so(toy: Any) -> None:
    found = mutants.hunt(toy(), planted("no such text", ""), [STAGE])
    assert found.result == mutants.NO_PLACE


def test_what_was_done_is_not_done_again(tmp_path: Path, capsys: Any) -> None:
    fault, out = FAULTS[0], tmp_path / "out"
    lines = [{"name": fault.name, "area": fault.area, "path": fault.path, "result": "failed"}]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert mutants.main(["--only", fault.name, "--out", str(out)]) == 0
    lines[0]["result"] = mutants.SURVIVED
    out.write_text(json.dumps(lines[0]) + "\n")
    assert mutants.main(["--only", fault.name, "--out", str(out)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "1", "0", "1"]


def test_a_sample_is_drawn_by_its_seed() -> None:
    drawn = [[one.name for one in mutants.chosen([], 10, seed)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 10
