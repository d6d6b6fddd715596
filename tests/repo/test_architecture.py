"""The floors of docs/internals/design.md, and other rules of the code, read from it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.cases.source import imported, parsed
from tokenyard.runtime import variables

SOURCE = Path(__file__).parents[2] / "src" / "tokenyard"

# A room may import rooms of lower floors, and itself. Rooms of one floor do not know each other.
FLOORS = {
    "types": 0,
    "errors": 0,
    "topology": 0,
    "wire": 1,
    "replicas": 1,
    "runtime": 2,
    "results": 3,
    "kernels": 3,
    "comm": 3,
    "spec": 3,
    "validate": 4,
    "shm": 4,
    "groups": 4,
    "transports": 5,
    "ops": 5,
    "engine": 7,
    "low_latency": 8,
    "opening": 9,
    "lifetime": 9,
    "buffer": 10,
    "nn": 11,
    "testing": 12,
    # The wings. Nothing above knows them.
    "observe": 13,
    "planner": 13,
    "compat": 14,
    "integrations": 15,
    "__init__": 16,
    "tools": 17,
    "__main__": 18,
}
WINGS = {"compat", "integrations", "observe", "planner", "tools"}

# Packages that only one room may know. (Numba comes with cloudpickle.)
OWNERS: dict[str, str | tuple[str, ...]] = {
    "numba": (
        "kernels/numba",
        "testing/processes.py",
        "testing/preloaded.py",
        "tools/bench/roof.py",
    ),
    "llvmlite": ("kernels/numba", "tools/bench/roof.py"),
    "triton": "kernels/triton",
    "pickle": "testing",
    "multiprocessing": "testing",
    "typer": "tools/cli",
    "rich": "tools/cli",
}


def room(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


FILES = sorted(SOURCE.rglob("*.py"))


def test_every_room_has_a_floor() -> None:
    assert {room(path.relative_to(SOURCE)) for path in FILES} == set(FLOORS)


def imports() -> Iterator[tuple[Path, str]]:
    """Every file, with each name that it imports."""
    for path in FILES:
        for name in imported(path):
            yield path.relative_to(SOURCE), name


def test_the_house_is_small_at_its_door() -> None:
    """Beside what makes it a package that can be run."""
    entries = {path.name for path in SOURCE.iterdir()} - {"__pycache__", "deep_ep_folder"}
    assert len(entries - {"__init__.py", "__main__.py", "py.typed"}) <= 27


def test_the_core_knows_no_wing() -> None:
    """What it tells them goes through `runtime.observers` and `results.read_handles_as`."""
    wrong = [
        f"{path} imports {name}"
        for path, name in imports()
        if room(path) not in WINGS | {"__init__", "__main__"}
        and name.startswith(tuple(f"tokenyard.{wing}" for wing in WINGS))
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_point_down() -> None:
    wrong = []
    for path, name in imports():
        here, parts = room(path), name.split(".")
        if parts[0] != "tokenyard" or here == "__init__":
            continue
        named = parts[1:2] and parts[1] in FLOORS
        there = parts[1] if named else "__init__"  # the package, or a name of it
        if there != here and FLOORS[there] >= FLOORS[here]:
            wrong.append(f"{path} imports {name}")
        if there == "spec" and here not in ("spec", "testing", "tools"):
            wrong.append(f"{path} imports the specification")
    assert not wrong, "\n".join(wrong)


def test_packages_stay_in_their_rooms() -> None:
    wrong = []
    for path, name in imports():
        owner = OWNERS.get(name.split(".")[0])
        if owner is not None and not path.as_posix().startswith(owner):
            wrong.append(f"{path} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_pickled_collectives() -> None:
    wrong = []
    for path in FILES:
        for node in ast.walk(parsed(path)):
            called = getattr(node, "attr", "")
            if called.endswith(("_object", "_object_list")):
                wrong.append(f"{path.relative_to(SOURCE)} calls {called}")
    assert not wrong, "\n".join(wrong)


# Functions of torch that make tensors, and those of them that take torch's default dtype.
MAKERS = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"}
MAKERS |= {"tensor", "zeros"}
OF_DEFAULT_DTYPE = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}
FOR_PEOPLE = {"planner", "spec", "testing", "tools"}


def test_tensors_are_made_where_and_as_is_said() -> None:
    """A default device or dtype is the user's, and compiled code is handed addresses."""
    wrong = []
    for path in FILES:
        if room(path.relative_to(SOURCE)) in FOR_PEOPLE:
            continue
        for node in ast.walk(parsed(path)):
            called = getattr(node, "func", None)
            if not isinstance(node, ast.Call) or not isinstance(called, ast.Attribute):
                continue
            of_torch = isinstance(called.value, ast.Name) and called.value.id == "torch"
            if not of_torch or called.attr not in MAKERS:
                continue
            named = {one.arg for one in node.keywords}
            # Weights of modules have the default dtype, as torch's own.
            any_dtype = called.attr not in OF_DEFAULT_DTYPE or "nn" in path.parts
            for word in ("device",) if any_dtype else ("device", "dtype"):
                if not named & {word, None, "pin_memory"}:
                    where = f"{path.relative_to(SOURCE)}:{node.lineno}"
                    wrong.append(f"{where} calls torch.{called.attr} without {word}")
    assert not wrong, "\n".join(wrong)


CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now")}


def test_nobody_waits_by_a_clock_that_is_set() -> None:
    wrong = []
    for path in FILES:
        if room(path.relative_to(SOURCE)) in FOR_PEOPLE | {"observe"}:
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                asked = node.value.id, node.attr
                if asked in CLOCKS:
                    where = f"{path.relative_to(SOURCE)}:{node.lineno}"
                    wrong.append(f"{where} asks {'.'.join(asked)}")
    assert not wrong, "\n".join(wrong)


ADDRESS = re.compile(
    r"data_ptr\(\)|from_address\(|\.ctypes\.data\b|addressof\(|int64s\.address\(|\.buffer_info\(\)"
    r"|\blies_at\("
)
PAGE = SOURCE.parents[1] / "docs/internals/shared_memory.md"


def test_every_address_has_an_owner() -> None:
    """As the page of shared memory says, module by module."""
    found = {}
    for path in FILES:
        name = path.relative_to(SOURCE).as_posix()
        if name.split("/")[0] not in ("tools", "kernels", "testing"):
            count = sum(bool(ADDRESS.search(line)) for line in path.read_text().splitlines())
            if count:
                found[name] = count
    told = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \| .", PAGE.read_text(), re.MULTILINE)
    assert {name: int(count) for name, count in told} == found


# Classes whose signatures DeepEP has given.
DEEPEPS = {"Buffer", "EPHandle", "ElasticBuffer", "HybridEPBuffer"}
MOST_PARAMETERS = 12


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """The names of a file's functions, and how many parameters each takes; not DeepEP's."""

    def visit(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", "lambda")
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                given = child.args
                each = (*given.posonlyargs, *given.args, *given.kwonlyargs)
                if len(inside) != 1 or inside[0] not in DEEPEPS:
                    yield ".".join((*inside, name)), len(each)
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from visit(child, (*inside, name))
            else:
                yield from visit(child, inside)

    yield from visit(parsed(path), ())


def test_no_function_takes_many_parameters() -> None:
    """DeepEP gave its classes their signatures; Triton kernels take numbers one by one."""
    many = [
        f"{path.relative_to(SOURCE)}: {name} takes {number}"
        for path in FILES
        if "triton" not in path.parts
        for name, number in functions(path)
        if number > MOST_PARAMETERS
    ]
    assert not many, "\n".join((f"want at most {MOST_PARAMETERS} parameters", *many))


# What only some sets have: how a set is built, and what its hardware alone can do.
OWN_KERNELS = {
    "reference": {"logfmt"},
    "numba": {
        "between_nodes",
        "caching",
        "call",
        "counters",
        "llvm",
        "logfmt",
        "progress",
        "ring",
    }
    | {"signals", "compile_lock"},
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


def test_the_environment_is_read_in_one_module() -> None:
    """And what tokenyard's own variables mean is told in one table of the guide."""
    reading = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in FILES
        if path != SOURCE / "runtime" / "variables.py"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    writing = {"compat/deepep_tests.py", "testing/processes.py"}
    assert {one.partition(":")[0] for one in reading} <= writing, reading
    page = (SOURCE.parents[1] / "docs" / "guide" / "operating.md").read_text()
    told: dict[str, str] = {}
    for names, default in re.findall(r"^\| (`TOKENYARD_[^|]*) \|.*\| ([^|]+) \|$", page, re.M):
        values = default.partition(";")[0].split(", ")
        told.update(zip(re.findall(r"`(\w+)`", names), values, strict=True))
    assert {name: "" if told[name] == "none" else told[name] for name in told} == variables.OURS


# Signatures that DeepEP gives, with what its users are told of each argument.
_LONG = {"buffer.py: dispatch", "compat/elastic/buffer.py: dispatch"}
_LONG |= {"compat/elastic/buffer.py: __init__", "compat/hybrid_ep/buffer.py: dispatch_with_permute"}


def test_files_and_functions_can_be_read_at_once() -> None:
    """Files of at most 400 lines, and functions of at most 60, but for the specification's."""
    too_long = set()
    for path in FILES:
        name = path.relative_to(SOURCE).as_posix()
        if len(path.read_text().splitlines()) > 400:
            too_long.add(name)
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef) and not name.startswith("spec/"):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= 60:
                    too_long.add(f"{name}: {node.name}")
    assert too_long == _LONG
