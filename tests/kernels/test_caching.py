"""Compiled kernels on disk: found again, never stale, kept somewhere wherever that is possible."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases.clock import scaled
from tests.cases.package import SOURCE, copy
from tests.cases.source import imported
from tokenyard.kernels.numba import caching
from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.progress import Progress

# The kernel is in rows.py, and copies rows with copy_bytes of llvm/pointers.py.
PACK = """
import torch
from tokenyard.kernels import load
x = torch.arange(8, dtype=torch.uint8).view(1, 8)
print(load("numba").pack(x, None, torch.zeros_like(x)).tolist())
from tokenyard.kernels.numba.rows import _pack_kernel
print(sum(_pack_kernel.stats.cache_hits.values()), _pack_kernel.stats.cache_path)
"""
WHOLE, HALF = "[[0, 1, 2, 3, 4, 5, 6, 7]]", "[[0, 1, 2, 3, 0, 0, 0, 0]]"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package, into which nothing was compiled yet."""
    return copy(tmp_path / "src")


def run(tree: Path, **settings: str) -> tuple[str, bool, str, str]:
    """The rows, whether their kernel was found on disk, in which folder, and what was logged."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_")}
    done = subprocess.run(
        [sys.executable, "-c", PACK],
        env={**kept, "PYTHONPATH": str(tree), "TOKENYARD_PROGRESS": "0", **settings},
        capture_output=True,
        text=True,
        timeout=scaled(250),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows, stats = done.stdout.splitlines()
    hits, _, folder = stats.partition(" ")
    return rows, int(hits) > 0, folder, done.stderr


def compiled(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".nbi", ".nbc"))


def test_a_kernel_is_compiled_again_when_a_function_of_another_file_changes(tree: Path) -> None:
    folder = tree / "tokenyard/kernels/numba/__pycache__"
    assert run(tree) == (WHOLE, False, str(folder), "")
    before = compiled(folder)
    assert run(tree) == (WHOLE, True, str(folder), "")
    assert compiled(folder) == before

    used = tree / "tokenyard/kernels/numba/llvm/pointers.py"
    count = "[target, source, args[2], flag(0)]"
    text = used.read_text()
    assert count in text
    used.write_text(text.replace(count, "[target, source, args[2].type(4), flag(0)]"))
    assert run(tree) == (HALF, False, str(folder), "")
    after = compiled(folder)
    assert len(after) == len(before)
    assert not set(after) & set(before)


def test_every_file_that_kernels_may_be_made_of_is_looked_at() -> None:
    """All of kernels/numba, and what those files import of the package, and so on."""
    package = SOURCE / "tokenyard"
    found: set[Path] = set()
    todo = set((package / "kernels/numba").rglob("*.py"))
    while todo:
        path = todo.pop()
        found.add(path)
        for name in imported(path):
            parts = name.split(".")
            for module in (parts, parts[:-1]):
                file = SOURCE.joinpath(*module[:-1], f"{(module or [name])[-1]}.py")
                todo |= {file} - found if file.exists() else set()
    assert set(caching.sources()) == found


def closed(tree: Path) -> dict[str, str]:
    """Files stand where the folders would be made: that stops root too."""
    (tree / "tokenyard/kernels/numba/__pycache__").touch()
    return {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null"}


@pytest.mark.slow
def test_a_folder_of_ones_own_holds_kernels_where_no_other_can_be_written(
    tree: Path, tmp_path: Path
) -> None:
    settings = {**closed(tree), "TMPDIR": str(tmp_path)}
    rows, hit, folder, said = run(tree, **settings)
    own = Path(folder).parent
    assert (rows, hit, own.parent) == (WHOLE, False, tmp_path)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    (line,) = said.splitlines()
    assert f"kept in {own}" in line
    assert "set NUMBA_CACHE_DIR" in line

    own.chmod(0o770)  # others may have put files there
    rows, hit, folder, said = run(tree, **settings)
    assert (rows, hit) == (WHOLE, False)
    assert not Path(folder).is_dir()
    (line,) = said.splitlines()
    assert "compiled anew in every process" in line
    assert "set NUMBA_CACHE_DIR" in line


@pytest.mark.slow
def test_kernels_that_come_with_the_package_are_found_from_elsewhere(
    tree: Path, tmp_path: Path
) -> None:
    """As in an image that was warmed up, and runs as another user."""
    assert run(tree)[:2] == (WHOLE, False)
    other = tmp_path / "other"
    rows, hit, folder, said = run(tree, NUMBA_CACHE_DIR=str(other))
    assert (rows, hit, said) == (WHOLE, True, "")
    assert folder.startswith(str(other))
    assert not list(other.rglob("*.nb?")), "nothing is written twice"


def add_one(number: Any) -> Any:
    return number + 1


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_torn_file_is_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert njit(cache=True)(add_one)(1) == 2
    (file,) = folder.rglob("*.nb?")
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    assert njit(cache=True)(add_one)(1) == 2
    assert "a compiled kernel cannot be read, and is compiled anew" in caplog.text
    again = njit(cache=True)(add_one)
    assert again(1) == 2
    assert sum(again.stats.cache_hits.values()) == 1


def test_a_disk_that_is_full_costs_no_call(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = njit(cache=True)(add_one)

    def full(*names: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.replace", full)
    assert kernel(1) == 2
    assert kernel(1.5) == 2.5
    (record,) = caplog.records
    assert "compiled kernels cannot be kept: [Errno 28] No space left on device" in record.message
    assert "set NUMBA_CACHE_DIR" in record.message
    assert list(folder.rglob("*.nb?*")) == []


def test_ranks_that_save_different_signatures_at_once_keep_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between what one writes of its index and of its data, another one writes both of its own."""
    one, other = njit(cache=True)(add_one), njit(cache=True)(add_one)
    replace, names = os.replace, []

    def meanwhile(source: str, target: str) -> None:
        replace(source, target)
        names.append(target)
        if len(names) == 1:
            assert other(1.5) == 2.5

    monkeypatch.setattr("os.replace", meanwhile)
    assert one(1) == 2
    again = njit(cache=True)(add_one)
    assert (again(1), again(1.5)) == (2, 2.5)
    assert len(names) == len(set(names)) == 2


@njit(nogil=True)
def inner(value):  # type: ignore[no-untyped-def]
    return value + 1


@njit(nogil=True)
def outer(value):  # type: ignore[no-untyped-def]
    return inner(value)


def test_one_process_of_a_launcher_says_what_is_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: -os.getpid())  # a launcher of its own
    monkeypatch.delenv("TOKENYARD_PROGRESS", raising=False)
    speaks, silent = Progress(), Progress()
    for one in (speaks, silent):
        with one.making(outer):
            one.beat(1.0)
            with one.making(inner):
                pass
            one._said -= 2.0
            one.beat(2.0)
    assert capsys.readouterr().err.splitlines() == [
        "tokenyard: compiling .outer, 1 of 2 functions, once for this machine",
        "tokenyard: compiling .outer, 2 of 2 functions, 2 s so far",
    ]
    outer(1)
    with speaks.making(outer):  # for another dtype
        speaks._said -= 2.0
        speaks.beat(3.0)
    assert capsys.readouterr().err == "tokenyard: compiling .outer, 1 of 1 functions, 3 s so far\n"
