"""A file that is being written is the old one, or the new one, never half of it."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from tokenyard.runtime.whole_file import whole_file, whole_folder

PARTS = re.compile(r"(\w+?)(-\d)?\.bin")


def test_readers_find_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with whole_file(path) as half:
        half.write_text("new, but")
        assert path.read_text() == "old"
        assert list(tmp_path.glob("run.json*")) == [path]  # a pattern finds no half file
        half.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("begun", [True, False])
def test_a_writer_that_fails_leaves_the_old_file_alone(tmp_path: Path, begun: bool) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")

    def write_half() -> None:
        with whole_file(path) as half:
            if begun:
                half.write_text("ne")
            raise ValueError("the disk is full")

    with pytest.raises(ValueError, match="the disk is full"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("before", [None, [], ["model.bin", "model-3.bin", "other.bin", "notes"]])
def test_a_folder_appears_whole(tmp_path: Path, before: list[str] | None) -> None:
    path = tmp_path / "deep" / "saved"
    if before is not None:
        path.mkdir(parents=True)
    for name in before or []:
        (path / name).write_text("old")
    with whole_folder(path, PARTS) as written:
        (written / "model-1.bin").write_text("new")
        (written / "sub").mkdir()
        (written / "sub" / "notes").write_text("new")
        assert sorted(one.name for one in path.glob("*")) == sorted(before or [])
    found = {
        str(one.relative_to(path)): one.read_text() for one in path.rglob("*") if one.is_file()
    }
    left = {"other.bin": "old", "notes": "old"} if before else {}
    assert found == {"model-1.bin": "new", "sub/notes": "new", **left}
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_fails_leaves_the_old_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    path.mkdir()
    (path / "model.bin").write_text("old")

    def write_half() -> None:
        with whole_folder(path, PARTS) as written:
            (written / "model-1.bin").write_text("new")
            raise ValueError("the disk is full")

    with pytest.raises(ValueError, match="the disk is full"):
        write_half()
    assert [one.name for one in path.iterdir()] == ["model.bin"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_of_somebody_else_is_not_followed(tmp_path: Path) -> None:
    """In a folder that others write to: no name that they can foresee is written to."""
    path, theirs, names = tmp_path / "run.json", tmp_path / "theirs", set[str]()
    theirs.write_text("theirs")
    foreseen = f".run.json.{os.getpid()}-{threading.get_ident()}.half"
    (tmp_path / foreseen).symlink_to(theirs)
    for _ in range(2):
        with whole_file(path) as half:
            half.write_text("new")
            names.add(half.parent.name)
            assert half.parent.parent == tmp_path
            assert half.parent.stat().st_mode & 0o077 == 0  # nobody else may put a link there
    assert len(names) == 2
    assert (theirs.read_text(), path.read_text()) == ("theirs", "new")
