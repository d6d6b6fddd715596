"""One finding: how good it is, what was seen, and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

OK, WARN, BAD = "ok", "warn", "bad"


class Finding(NamedTuple):
    level: str  # OK; WARN: it works, but slowly or not everywhere; BAD: something cannot work
    part: str
    what: str
    advice: str = ""


def read(path: str | Path) -> str | None:
    """The text of a file of the system; None where there is none, or none to be read."""
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def size_text(number: int) -> str:
    """Bytes for a person.

    >>> size_text(20 << 20), size_text(3 << 30)
    ('20 MiB', '3.0 GiB')
    """
    if number < 1 << 30:
        return f"{number / 2**20:.0f} MiB"
    return f"{number / 2**30:.1f} GiB"
