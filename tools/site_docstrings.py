"""Docstrings as the reference of the site shows them: examples as Python, columns as tables.

mkdocstrings reads docstrings as Markdown, to which `>>>` is a quotation in a quotation, and two
columns, by which our docstrings explain names, are a block of code that a phone cuts off. This
extension of griffe, which mkdocs.yml names, rewrites both, and takes the comment behind a field as
what is said about it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class Readable(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None and obj.is_attribute:
            told = _comment(obj)
            obj.docstring = griffe.Docstring(told, parent=obj) if told else None
        if obj.docstring is not None:
            obj.docstring.value = tabled(fenced(obj.docstring.value))


def _comment(field: griffe.Object) -> str | None:
    """What stands behind a field, on its last line."""
    if field.endlineno is None or not field.lines_collection:
        return None
    assert not isinstance(field.filepath, list)  # that is a package's, which has no line
    line = field.lines_collection[field.filepath][field.endlineno - 1]
    found = re.search(r"  # (?!noqa|type:)(.+)$", line)
    return found[1] if found else None


def fenced(text: str) -> str:
    """The text with fences around examples that stand free."""
    lines: list[str] = []
    is_inside = False
    for line in text.splitlines():
        if not is_inside and line.startswith(">>>"):
            lines += ["", "```pycon"] if lines and lines[-1] else ["```pycon"]
            is_inside = True
        elif is_inside and not line.strip():
            lines.append("```")
            is_inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if is_inside else lines)


def tabled(text: str) -> str:
    """
    >>> print(tabled("Both:\\n\\n    x     rows,\\n          [T, D]\\n    y, z  sums"))
    Both:
    <BLANKLINE>
    | | |
    |---|---|
    | `x` | rows, [T, D] |
    | `y, z` | sums |
    """
    parts = text.split("\n\n")
    return "\n\n".join(_table(part) or part for part in parts)


def _table(part: str) -> str | None:
    """A part that is two columns, as a table; None if it is something else."""
    lines = part.splitlines()
    found = [re.match(r"(\S(?:.*?\S)??)  +(?=\S)", line.strip()) for line in lines]
    is_indented = all(line.startswith("    ") for line in lines)
    if not is_indented or len(lines) < 2 or not any(found) or part.lstrip().startswith(">>>"):
        return None
    edge = min(len(line) - len(line.lstrip()) for line in lines)
    (first, *_) = [line for line, match in zip(lines, found) if match]
    match = re.match(r"\s*\S(?:.*?\S)??  +(?=\S)", first)
    assert match is not None
    column = match.end()
    rows: list[tuple[str, list[str]]] = []
    for line in lines:
        name, said = line[edge:column].strip(), line[column:].strip()
        if line[edge] == " " and not name and rows:
            rows[-1][1].append(said)
        elif line[edge] != " " and (line[column - 2 : column] == "  " or not said):
            rows.append((name, [said]))
        elif line[edge] != " " and "  " not in line.strip():
            rows.append((line.strip(), []))  # a name too long for its column; its text follows
        else:
            return None
    cells = [(name, " ".join(filter(None, said)).replace("|", "\\|")) for name, said in rows]
    if not all(said for _, said in cells):
        return None
    return "\n".join(["| | |", "|---|---|", *(f"| `{name}` | {said} |" for name, said in cells)])
