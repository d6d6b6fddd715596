"""A page in one file: a picture, tables and notes, without scripts, fonts or links to elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 58rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .9rem .2rem 0; text-align: left; }
th { border-bottom: 1px solid #999; } td.number { text-align: right; }
svg { max-width: 100%; height: auto; } p.note { color: #555; }
"""


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a command of the planner shows, as a table in a terminal or as a page."""

    title: str
    tables: Sequence[Table]
    notes: Sequence[str] = field(default_factory=tuple)


def page_of(report: Report, picture: str) -> str:
    """HTML; the picture is SVG."""
    parts = [f"<h1>{escape(report.title)}</h1>", picture]
    for table in report.tables:
        head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
        rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in table.rows)
        parts.append(f"<h2>{escape(table.title)}</h2>\n<table><tr>{head}</tr>\n{rows}</table>")
    parts += [f'<p class="note">{escape(note)}</p>' for note in report.notes]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _cell(value: object) -> str:
    mark = ' class="number"' if isinstance(value, (int, float)) else ""
    return f"<td{mark}>{escape(str(value))}</td>"
