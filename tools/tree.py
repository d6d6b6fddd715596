"""The tree of src/tokenyard, with a line on each file, for docs/internals/design.md.

`python -m tools.tree` prints it, `python -m tools.tree --write` puts it into the page, and
tests/repo/test_tree.py fails while the page has another. A line is the first clause of a docstring.
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tokenyard"
PAGE = ROOT / "docs" / "internals" / "design.md"
BEGIN, END = "<!-- tree: python -m tools.tree --write -->", "<!-- end of the tree -->"
_NAMES = 30  # characters of the column of names
_MOST = 88  # characters of what is said about a file


def tree() -> str:
    lines = ["src/tokenyard/", *_inside(SOURCE, 1)]
    return "\n".join(line.rstrip() for line in lines)


def page_with_tree(page: str) -> str:
    """The text of the page, with today's tree between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n```text\n{tree()}\n```\n{END}{after}"


def _inside(folder: Path, depth: int) -> list[str]:
    """Files first, then folders, by name."""
    lines = []
    entries = [path for path in folder.iterdir() if path.name[:2] not in ("__", "py")]
    for path in sorted(entries, key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            lines.append(_line(f"{path.name}/", path / "__init__.py", depth))
            lines += _inside(path, depth + 1)
        elif path.suffix == ".py":
            lines.append(_line(path.name, path, depth))
    return lines


def _line(name: str, path: Path, depth: int) -> str:
    return f"{'  ' * depth + name:{_NAMES}} {_said(path)}"


def _said(path: Path) -> str:
    """The docstring's first sentence, or what of it fits and ends before a colon or a comma."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    sentence = re.split(r"\.(?: |$)", text)[0]
    for mark in (": ", "; ", ", "):
        while len(sentence) > _MOST and mark in sentence:
            sentence = sentence.rpartition(mark)[0]
    return sentence if len(sentence) <= _MOST else sentence[: _MOST - 3].rsplit(" ", 1)[0] + " ..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into the page")
    if parser.parse_args().write:
        PAGE.write_text(page_with_tree(PAGE.read_text()))
    else:
        print(tree())


if __name__ == "__main__":
    main()
