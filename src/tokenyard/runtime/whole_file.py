"""A file, or a folder, is written whole or not at all: a reader of the path meanwhile finds the
old one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Write to the path that this gives. At the end that file takes its place; if the block raises,
    it is removed.

    It lies beside `path`, since only within a file system a file takes another's place at once: in
    a new folder, where nobody else can have put a link. Its name begins with a dot, so that no
    pattern of names that begin with `path` finds it.
    """
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as beside:
        half = Path(beside, path.name)
        yield half
        half.replace(path)


@contextmanager
def whole_folder(path: Path, parts: re.Pattern[str]) -> Iterator[Path]:
    """Write into the folder that this gives. At the end it takes the place of one that is not there
    or empty. In another, files are replaced one by one; and where one that matches `parts` came,
    others go that were there and have the same first group.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as beside:
        written = Path(beside, path.name)
        written.mkdir()
        yield written
        if not path.is_dir() or not any(path.iterdir()):
            written.replace(path)
            return
        files = [one.relative_to(written) for one in written.rglob("*") if one.is_file()]
        for file in files:
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (written / file).replace(path / file)
        new = {match[1] for file in files if (match := parts.fullmatch(str(file)))}
        for old in path.iterdir():
            match = parts.fullmatch(old.name)
            if match and match[1] in new and Path(old.name) not in files:
                old.unlink()
