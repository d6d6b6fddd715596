"""A file is written whole or not at all: whoever reads the path meanwhile finds the old one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Write to the path that this gives. At the end that file takes its place; if the block raises,
    it is removed.

    It lies in the same folder, since only within a file system a file takes another's place at
    once. Its name begins with a dot, so that no pattern of names that begin with `path` finds it.
    """
    half = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.half")
    try:
        yield half
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
