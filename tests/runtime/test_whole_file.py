"""A file that is being written is the old one, or the new one, never half of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenyard.runtime.whole_file import whole_file


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
