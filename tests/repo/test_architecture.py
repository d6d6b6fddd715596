"""Imports point down: the floors of docs/internals/design.md, read from the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.cases.source import imported

SOURCE = Path(__file__).parents[2] / "src" / "tokenyard"

# A room may import rooms of lower floors, and itself. Rooms of one floor do not know each other.
FLOORS = {
    "v1_tuple": -2,
    "v1_fields": -1,
    "types": 0,
    "errors": 0,
    "topology": 0,
    "deep_ep_path": 0,
    "wire": 1,
    "tracing": 3,
    "routing": 3,
    "recording": 4,
    "replicas": 1,
    "planner": 2,
    "runtime": 2,
    "kernels": 3,
    "comm": 3,
    "spec": 3,
    "validate": 3,
    "shm": 4,
    "groups": 4,
    "transports": 5,
    "ops": 5,
    "engine": 7,
    "low_latency": 8,
    "sizing": 9,
    "opening": 9,
    "lifetime": 9,
    "hardware": 9,
    "results": 9,
    "buffer": 10,
    "elastic": 10,
    "hybrid_ep": 11,
    "nn": 11,
    "integrations": 12,
    "testing": 13,
    "warming": 14,
    "__init__": 15,
    "bench": 16,
    "doctor": 16,
    "cli": 17,
    "__main__": 18,
}

# Packages that only one room may know. (Numba comes with cloudpickle.)
OWNERS: dict[str, str | tuple[str, ...]] = {
    "numba": (
        "kernels/numba",
        "testing/processes.py",
        "testing/preloaded.py",
        "bench/roof.py",
    ),
    "llvmlite": ("kernels/numba", "bench/roof.py"),
    "triton": "kernels/triton",
    "pickle": "testing",
    "multiprocessing": "testing",
    "typer": "cli",
    "rich": "cli",
}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


FILES = sorted(SOURCE.rglob("*.py"))


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in FILES} == set(FLOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    here = room(path)
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "tokenyard" or here == "__init__":
            continue
        named = parts[1:2] and parts[1] in FLOORS
        there = parts[1] if named else "__init__"  # the package, or a name of it
        assert there == here or FLOORS[there] < FLOORS[here], f"{here} imports {name}"
        knows_spec = here in ("spec", "testing", "bench")
        assert there != "spec" or knows_spec, f"{here} imports the specification"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_packages_stay_in_their_rooms(path: Path) -> None:
    where = path.relative_to(SOURCE).as_posix()
    for name in imported(path):
        owner = OWNERS.get(name.split(".")[0])
        assert owner is None or where.startswith(owner), f"{where} imports {name}"


def test_no_pickled_collectives() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            called = getattr(node, "attr", "")
            assert not called.endswith(("_object", "_object_list")), f"{path} calls {called}"


# What only some sets have: how a set is built, and what its hardware alone can do.
OWN_KERNELS = {
    "reference": {"logfmt"},
    "numba": {
        "between_nodes",
        "caching",
        "counters",
        "exchange",
        "llvm",
        "logfmt",
        "parcels",
        "progress",
        "ring",
    }
    | {"signals", "turns"},
    "triton": {"floats", "launch", "symmetric"},
}


def test_kernel_sets_have_the_same_files() -> None:
    """So that whoever knows where one set's reduce is finds the others'."""
    names = {}
    for kernels, own in OWN_KERNELS.items():
        inside = (SOURCE / "kernels" / kernels).iterdir()
        found = {path.stem for path in inside if path.stem[:2] != "__"}
        assert own <= found, f"{kernels} has no {own - found}"
        names[kernels] = found - own
    assert names["numba"] == names["triton"] == names["reference"]
