"""A recording as one HTML page: no script, no request, light and dark, wide and narrow."""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np

from tokenyard.observe.routing import charts
from tokenyard.observe.routing.figures import Figures
from tokenyard.observe.routing.report import Report

_MOST_EXPERTS = 10  # that the table names

_LIGHT = f"--ink: {charts.INK}; --line: {charts.LINE}; --main: {charts.MAIN}; --hot: {charts.HOT};"
_STYLE = f":root {{ {_LIGHT} }}"
_STYLE += """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --soft: #5b6472;
  --ok: #2b8a3e; --warn: #b35c00; --bad: #c92a2a; --on: #fff; }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --card: #1d2229; --ink: #e6e9ee;
  --soft: #a0a9b6; --line: #343b45; --main: #74a5ff; --hot: #ff922b; --ok: #69db7c; --warn: #ffc078;
  --bad: #ff8787; --on: #0e131b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 24px 16px 48px; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 2px; }
p { margin: 0; }
.soft { color: var(--soft); font-size: 0.92rem; }
.grid { display: grid; gap: 16px; margin-top: 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px; min-width: 0; }
.findings { list-style: none; margin: 16px 0 0; padding: 0; }
.findings li { background: var(--card); border: 1px solid var(--line); border-left-width: 5px;
  border-radius: 6px; padding: 8px 12px; margin-top: 8px; overflow-wrap: anywhere; }
.findings .ok { border-left-color: var(--ok); }
.findings .warn { border-left-color: var(--warn); }
.findings .bad { border-left-color: var(--bad); }
.findings .note { border-left-color: var(--main); }
svg { display: block; width: 100%; height: auto; margin-top: 8px; }
svg text { fill: var(--soft); font-size: 13px; font-family: inherit; }
@media (max-width: 560px) { svg text { font-size: 16px; } }
svg .value { fill: var(--ink); } svg .on { fill: var(--on); }
.main { fill: var(--main); } .hot { fill: var(--hot); } .axis { stroke: var(--line); }
.mean { stroke: var(--ink); stroke-dasharray: 5 4; opacity: 0.6; }
.ranks { stroke: var(--main); fill: none; stroke-width: 2; }
.experts { stroke: var(--hot); fill: none; stroke-width: 1.6; opacity: 0.75; }
.dot { stroke: none; } .ranks.dot { fill: var(--main); } .experts.dot { fill: var(--hot); }
.scroll { overflow-x: auto; margin-top: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; }
th, td { text-align: right; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 600; }
footer { margin-top: 24px; }
"""


def write(report: Report, path: Path) -> None:
    path.write_text(html(report), encoding="utf-8")


def html(report: Report) -> str:
    total = report.total
    found = "".join(
        f'<li class="{finding.level}">{escape(finding.text)}</li>' for finding in report.findings
    )
    if len(report.each) > 1:
        loads = np.array([one.load / (one.load.mean() or 1.0) for one in report.each])
        experts = _card(
            "Load of experts, by layer",
            f"By each layer's mean; the highest is {loads.max():.1f} x.",
            charts.heat_map(loads, "expert", "layer", "{:.2f} x the mean"),
        )
    else:
        experts = _card("Load of experts", _mean(total.load), charts.bars(total.load, "expert"))
    traffic, unit = total.traffic_of_a_step
    cards = [
        experts,
        _card("Load of ranks", _mean(total.rank_load), charts.bars(total.rank_load, "rank")),
        _card(
            f"Traffic of a step, in {unit}",
            f"From rank to rank, {total.row_bytes:,} bytes a row, each token once a rank.",
            charts.heat_map(traffic, "to rank", "from rank", f"{{:.3g}} {unit}"),
        ),
        _card(
            "Imbalance over steps",
            "The busiest by the mean: ranks in blue, experts in orange. 1 is balanced.",
            charts.lines(
                total.step, {"experts": total.expert_imbalance, "ranks": total.rank_imbalance}
            ),
        ),
        _card("Copies", "Rows that all ranks send, by how often a token is sent.", _copies(total)),
        _card("Busiest experts", "", _busiest(report)),
    ]
    if len(report.each) > 1:
        layers = _table(*report.table_of_layers())
        cards.append(_card("Layers", "The busiest by the mean, over all steps.", layers))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Routing: {escape(report.title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>Routing of {escape(_what(total))}</h1>"
        f'<p class="soft">{escape(report.title)}</p>'
        f'<ul class="findings">{found}</ul><div class="grid">{"".join(cards)}</div>'
        '<footer class="soft">Made by <code>tokenyard inspect</code>.</footer></body></html>\n'
    )


def _what(figures: Figures) -> str:
    return figures.names[0] if len(figures.names) == 1 else f"{len(figures.names)} layers"


def _card(title: str, below: str, content: str) -> str:
    note = f'<p class="soft">{escape(below)}</p>' if below else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{note}{content}</section>'


def _mean(loads: np.ndarray) -> str:
    return f"By the mean of {loads.mean():,.0f} rows; orange is above {charts.ABOVE} x."


def _copies(figures: Figures) -> str:
    within, abroad = figures.rows, figures.rows_between_nodes
    names = {"per_expert": "once an expert", "per_rank": "once a rank", "per_node": "once a node"}
    rows = [
        [name, f"{within[key]:,}", f"{abroad[key]:,}"]
        for key, name in names.items()
        if key != "per_node" or figures.places.num_nodes > 1
    ]
    return _table(["a token is sent", "rows", "of these between nodes"], rows)


def _busiest(report: Report) -> str:
    found = [
        (one.load[expert] / (one.load.mean() or 1.0), expert, one)
        for one in report.each
        for expert in np.argsort(-one.load, kind="stable")[:_MOST_EXPERTS].tolist()
    ]
    found.sort(key=lambda row: -row[0])
    rows = [
        [
            f"{expert}" if len(report.each) == 1 else f"{expert} of {one.names[0]}",
            str(one.places.rank_of_expert[expert]),
            f"{one.load[expert]:,}",
            f"{ratio:.2f} x",
        ]
        for ratio, expert, one in found[:_MOST_EXPERTS]
    ]
    return _table(["expert", "rank", "rows", "by the mean"], rows)


def _table(columns: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
