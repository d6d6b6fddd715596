"""What pages of docs/ show: blocks of Python, and commands with their output.

In a ```console block, lines that begin with `$ ` are commands, and what follows is their output. A
comment before the block says how it is run:

    <!-- slow -->                       at night only
    <!-- exit 2 -->                     the last command ends so
    <!-- run by tests/repo/x.py -->     not here: that test runs it
    <!-- not run: why -->

This file is also the program that runs the Python of several pages in one process.
"""

from __future__ import annotations

import re
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))

# Pages whose Python has one of these need a process of their own.
_ALONE = ("init_process_group", "environ", "sys.path", "compile(")


def python_of(page: Path) -> str:
    """All blocks of Python of a page, one after the other."""
    return "\n".join(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    )


def runs_alone(page: Path) -> bool:
    return any(word in python_of(page) for word in _ALONE)


class Command(NamedTuple):
    line: str
    shown: str  # the output


class Console(NamedTuple):
    page: Path
    number: int  # among those of the page
    note: str  # of the comment before it
    commands: list[Command]

    @property
    def name(self) -> str:
        return f"{self.page.stem}-{self.number}"


def consoles_of(page: Path) -> list[Console]:
    pattern = r"(?:<!-- ([^\n]*?) -->\n+)?^```console\n(.*?)^```"
    found = []
    for number, (note, text) in enumerate(
        re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE)
    ):
        commands = []
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            while (line := part.partition("\n")[0]).endswith("\\"):  # goes on in the next line
                part = part.replace("\\\n", " ", 1)
            commands.append(Command(line.partition("  #")[0], part.partition("\n")[2]))
        found.append(Console(page, number, note, commands))
    return found


def words(text: str) -> set[str]:
    """The words of an output that do not vary: of four letters or more, and nothing else."""
    return {word for word in re.findall(r"[^\s│┃|]+", text) if re.fullmatch(r"[A-Za-z]{4,}", word)}


def main(scripts: list[str]) -> int:
    failed = 0
    for script in scripts:
        begin = time.monotonic()
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            failed += 1
            print(f"FAILED {Path(script).stem}", flush=True)
            traceback.print_exc()
        print(f"{Path(script).stem}: {time.monotonic() - begin:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
