"""Charts as SVG, for a page whose style gives the colours: they follow light and dark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# The colours of the light page and of the picture.
INK, LINE, MAIN, HOT = "#1f2430", "#dfe3e8", "#2f66d0", "#d9480f"
ABOVE = 1.3  # times the mean: drawn as hot

_WIDTH, _HEIGHT = 440, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 10, 40
_MOST_BARS, _MOST_CELLS = 256, 64
_MOST_POINTS = 400


def bars(loads_X: np.ndarray, what: str) -> str:
    """A bar for each, by the mean; those above ABOVE are hot. Of many, a bar is for several."""
    ratios = loads_X / (loads_X.mean() or 1.0)
    # Of a block the tallest is drawn: a mean would hide what is hot.
    shown, block = blocks(ratios[None], _MOST_BARS, np.max)
    top = max(1.25, 1.05 * float(ratios.max()))
    step = (_WIDTH - _LEFT - _RIGHT) / shown.shape[1]
    parts = [_y_axis(top), _x_axis(what, len(loads_X), lambda n: _LEFT + (n / block + 0.5) * step)]
    for number, ratio in enumerate(shown[0].tolist()):
        height = ratio / top * (_HEIGHT - _TOP - _BOTTOM)
        name = f"{what} {number * block}" + (f" to {number * block + block - 1}" * (block > 1))
        parts.append(
            f'<rect class="{"hot" if ratio > ABOVE else "main"}" x="{_LEFT + number * step:.2f}" '
            f'y="{_HEIGHT - _BOTTOM - height:.2f}" width="{step * 0.82:.2f}" '
            f'height="{height:.2f}"><title>{name}: {ratio:.2f} x the mean</title></rect>'
        )
    mean = _height(1.0, top)
    parts.append(
        f'<line class="mean" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{mean:.1f}" y2="{mean:.1f}"/>'
    )
    return _svg(parts, _HEIGHT, f"load of each {what} by the mean")


def lines(step_S: np.ndarray, named: dict[str, np.ndarray]) -> str:
    """Lines over steps, from 0; the name of a line is its class."""
    top = max(1.25, *(1.05 * float(values.max()) for values in named.values()))
    first, last = int(step_S[0]), int(step_S[-1])
    width = _WIDTH - _LEFT - _RIGHT

    def x(step: float) -> float:
        return _LEFT + (width * (step - first) / (last - first) if last > first else width / 2)

    ticks = _ticks(last - first)
    parts = [_y_axis(top), f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 6}" {_MIDDLE}>step</text>']
    for tick in ticks:
        parts.append(
            f'<text x="{x(first + tick):.1f}" y="{_HEIGHT - _BOTTOM + 16}" {_MIDDLE}>'
            f"{first + tick}</text>"
        )
    mean = _height(1.0, top)
    parts.append(
        f'<line class="mean" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{mean:.1f}" y2="{mean:.1f}"/>'
    )
    # Of many steps so many as the width can show, the last one among them.
    shown = np.unique(np.linspace(0, len(step_S) - 1, _MOST_POINTS).astype(int))
    for name, values in named.items():
        points = [(x(float(step_S[n])), _height(float(values[n]), top)) for n in shown]
        if len(points) == 1:
            (cx, cy) = points[0]
            parts.append(f'<circle class="{name} dot" cx="{cx:.1f}" cy="{cy:.1f}" r="4"/>')
        text = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline class="{name}" points="{text}"/>')
    return _svg(parts, _HEIGHT, "imbalance over steps")


def heat_map(values_YX: np.ndarray, across: str, down: str, form: str) -> str:
    """A cell for each; the largest is darkest. Large ones are drawn in blocks, by their mean."""
    shown, by_x = blocks(values_YX, _MOST_CELLS, np.mean)
    turned, by_y = blocks(shown.T, _MOST_CELLS, np.mean)
    shown = turned.T
    rows, columns = shown.shape
    width = _WIDTH - _LEFT - _RIGHT
    cell_x = width / columns
    cell_y = max(22.0, 230 / rows) if rows <= 8 else 300 / rows
    cell_y = min(cell_y, 3 * cell_x)
    height = _TOP + rows * cell_y + _BOTTOM
    largest = float(shown.max()) or 1.0
    parts = []
    for (y, x), value in np.ndenumerate(shown):
        weight = value / largest
        left, top = _LEFT + x * cell_x, _TOP + y * cell_y
        parts.append(
            f'<rect class="main" fill-opacity="{0.04 + 0.9 * weight:.3f}" x="{left:.2f}" '
            f'y="{top:.2f}" width="{cell_x:.2f}" height="{cell_y:.2f}"><title>{down} {y * by_y}, '
            f"{across} {x * by_x}: {form.format(value)}</title></rect>"
        )
        if columns <= 8 and cell_y >= 20:
            kind = "on" if weight > 0.65 else "value"  # upon a strong colour
            x_text, y_text = left + cell_x / 2, top + cell_y / 2 + 4
            parts.append(
                f'<text class="{kind}" x="{x_text:.1f}" y="{y_text:.1f}" {_MIDDLE}>'
                f"{value:.3g}</text>"
            )
    for tick in _ticks(rows * by_y - 1):
        y = _TOP + (tick / by_y + 0.5) * cell_y + 4
        parts.append(f'<text x="{_LEFT - 6}" y="{y:.1f}" text-anchor="end">{tick}</text>')
    for tick in _ticks(columns * by_x - 1):
        x = _LEFT + (tick / by_x + 0.5) * cell_x
        y = _TOP + rows * cell_y + 16
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {_MIDDLE}>{tick}</text>')
    middle = _TOP + rows * cell_y / 2
    parts.append(
        f'<text x="{_LEFT + columns * cell_x / 2:.1f}" y="{height - 6:.1f}" {_MIDDLE}>{across}'
        "</text>"
        f'<text transform="translate(13 {middle:.1f}) rotate(-90)" {_MIDDLE}>{down}</text>'
    )
    return _svg(parts, height, f"{down} by {across}")


_MIDDLE = 'text-anchor="middle"'


def _height(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)


def _y_axis(top: float) -> str:
    tick = next(t for t in (0.25, 0.5, 1, 2, 5, 10, 25, 50, 100, 1e3, 1e9) if top / t <= 5.2)
    parts = []
    for number in range(int(top / tick) + 1):
        y = _height(number * tick, top)
        parts.append(
            f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number * tick:g}</text>'
        )
    return "".join(parts)


def _x_axis(what: str, count: int, place: Callable[[int], float]) -> str:
    parts = [
        f'<text x="{place(tick):.1f}" y="{_HEIGHT - _BOTTOM + 16}" {_MIDDLE}>{tick}</text>'
        for tick in _ticks(count - 1)
    ]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return "".join(parts) + f'<text x="{middle}" y="{_HEIGHT - 6}" {_MIDDLE}>{what}</text>'


def _ticks(last: int) -> list[int]:
    """Round numbers from 0 to the last, at most nine.

    >>> _ticks(3), _ticks(63), _ticks(0)
    ([0, 1, 2, 3], [0, 10, 20, 30, 40, 50, 60], [0])
    """
    step = next(s * 10**p for p in range(12) for s in (1, 2, 5) if last // (s * 10**p) <= 8)
    return list(range(0, last + 1, step))


def blocks(values_YX: np.ndarray, most: int, merge: Any) -> tuple[np.ndarray, int]:
    """At most so many columns, each of which stands for as many: and how many that is."""
    columns = values_YX.shape[1]
    block = -(-columns // most)
    if block == 1:
        return values_YX, 1
    parts = [merge(values_YX[:, n : n + block], axis=1) for n in range(0, columns, block)]
    return np.stack(parts, 1), block


def _svg(parts: list[str], height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )
