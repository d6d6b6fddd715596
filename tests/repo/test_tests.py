"""How tests are laid out and written: read from their code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases.lanes import at_night
from tests.cases.source import imported, parsed

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))

# Rooms that have no folder of the source: what is about several of them, or about none.
ACROSS = {"callers", "cases", "cluster", "compat", "faults", "fuzz", "gpu", "hostile", "models"}
ACROSS |= {"repo", "wrappers"}
# Programs that are run by hand too.
PROGRAMS = ("tests/fuzz", "tests/nn/programs")


def test_folders_are_those_of_the_source() -> None:
    source = {path.name for path in (ROOT / "src" / "tokenyard").iterdir() if path.is_dir()}
    rooms = {path.relative_to(TESTS).parts[0] for path in FILES if path.parent != TESTS}
    assert rooms <= source | ACROSS


def test_helpers_are_in_cases() -> None:
    for path in FILES:
        where = path.relative_to(ROOT).as_posix()
        is_test = path.name.startswith("test_") or path.name == "conftest.py"
        assert is_test or where.startswith(("tests/cases", *PROGRAMS)), f"{where} is no test"
        assert not (is_test and where.startswith("tests/cases")), f"{where} is a test"
        for name in imported(path):
            parts = name.split(".")
            assert parts[0] != "tests" or not any(part.startswith("test_") for part in parts), (
                f"{where} imports {name} from a test module"
            )


def test_what_is_inside_a_buffer_is_touched_in_one_place() -> None:
    """A redesign changes that module. Whoever wants to know asks `Buffer.stats`."""
    touching = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr in ("_engine", "_low_latency")
        if path != TESTS / "cases" / "inside.py"
    ]
    assert not touching, f"want a function of tests/cases/inside.py: {touching}"


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """Every call in a file, and what is called."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def test_limits_on_the_clock_are_scaled() -> None:
    """timeout=3 is wrong, timeout=scaled(3) right. A pool of processes scales what it is given;
    Settings are compared, not used.
    """
    for path in FILES:
        for node, called in calls(path):
            where = f"{path.relative_to(ROOT)}:{node.lineno}: {called}"
            limit = {one.arg: one.value for one in node.keywords}.get("timeout")
            if called not in ("processes", "settings.Settings"):
                assert not isinstance(limit, ast.Constant), f"{where}: timeout is not scaled"
            if called == "time.sleep" and isinstance(node.args[0], ast.Constant):
                pause = float(str(node.args[0].value))
                assert pause <= 0.05, f"{where}: more than a pause between two looks, not scaled"


def test_tests_can_fail() -> None:
    """By an assertion of their own, or in what they call: a job on ranks, or a comparison."""
    checks = ("assert", "check", "raises", "warns", "run", "same")
    for path in FILES:
        for node in parsed(path).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            inside = list(ast.walk(node))
            called = [ast.unparse(one.func) for one in inside if isinstance(one, ast.Call)]
            assert any(isinstance(one, ast.Assert) for one in inside) or any(
                word in name for name in called for word in checks
            ), f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} asserts nothing"


def test_parameters_of_the_night_are_plain_values() -> None:
    """One with marks inside another would be handed to the test as it is."""
    night = at_night(["a", "b"], gate=("b",))
    assert night == [pytest.param("a", marks=pytest.mark.slow), "b"]
    wrong: dict[str, tuple[Any, Any]] = {
        "got parameters with marks": (night, ()),
        "got parameters with marks: .*'a'": (["a", "b"], night),
        "gate has .'c'., which no parameter is": (["a", "b"], ("b", "c")),
    }
    for message, (params, gate) in wrong.items():
        with pytest.raises((TypeError, ValueError), match=message):
            at_night(params, gate)


def test_files_that_tests_name_from_where_they_stand_are_there() -> None:
    """A test that has moved would look for its files beside the old place."""
    made = ("'.ci'", "'shared'")  # environments, and what lies beside the repository
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.BinOp):
                continue
            named = ast.unparse(node)
            if re.fullmatch(r"Path\(__file__\)\.parents?\S*( / '[^']+')+", named) and not any(
                word in named for word in made
            ):
                found = eval(named, {"Path": Path, "__file__": str(path)})
                assert found.exists(), f"{path.relative_to(ROOT)}:{node.lineno}: {named}"


def test_the_step_of_triton_has_all_rooms_with_its_tests() -> None:
    """In all other steps they skip."""
    of_triton = {
        path.relative_to(TESTS).parts[0]
        for path in FILES
        if {"pytest.mark.triton", "SETS"} & {ast.unparse(one) for one in ast.walk(parsed(path))}
    }
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    (step,) = [line for line in lines if "TRITON_INTERPRET=1" in line]
    assert of_triton - {"cases"} <= set(re.findall(r"tests/(\w+)", step))


def test_nothing_is_selected_by_a_substring() -> None:
    for line in (ROOT / ".ci" / "run").read_text().splitlines():
        assert " -k " not in line, line
