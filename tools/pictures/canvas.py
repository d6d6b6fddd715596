"""A sheet on which boxes, words and arrows are drawn, and which becomes an SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

Point = tuple[float, float]

# The colours of ranks 0 to 3. White words read well on them, and they on light and dark paper.
RANKS = ("#3b6cb7", "#b3601a", "#2f7d4f", "#7d55ad")

# For a picture that stands alone. tools/site_hooks.py takes this part out: there site.css rules.
ALONE = """<style>
:root { --ty-ink: #1f2937; --ty-soft: #5b6472; --ty-line: #8b93a1; --ty-back: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ty-ink: #e5e7eb; --ty-soft: #a9b2c0; --ty-line: #7b8594; --ty-back: #1b1e26; }
}
</style>
"""
_STYLE = """<style>
.ty-svg { font-family: system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
.ty-back { fill: var(--ty-back, none); }
.ty-ink { fill: var(--ty-ink); }
.ty-soft { fill: var(--ty-soft); }
.ty-white { fill: #ffffff; }
.ty-line { stroke: var(--ty-line); fill: none; }
.ty-head { fill: var(--ty-line); }
</style>
"""


class Canvas:
    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def svg(self) -> str:
        width, height = self._size
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="ty-svg" role="img" '
            f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-size="14">'
        )
        paper = f'<rect class="ty-back" width="{width}" height="{height}" rx="8"/>'
        parts = "\n".join(self._parts)
        title = f"<title>{escape(self._title)}</title>"
        return f"{opening}\n{title}\n{ALONE}{_STYLE}{paper}\n{parts}\n</svg>\n"

    def text(
        self,
        at: Point,
        words: str,
        kind: str = "ink",
        *,
        size: float = 14,
        anchor: str = "middle",
        weight: int = 400,
    ) -> None:
        """One line of words, whose baseline is at the point."""
        self._parts.append(
            f'<text class="ty-{kind}" x="{at[0]:g}" y="{at[1]:g}" font-size="{size:g}" '
            f'text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
        )

    def lines(self, at: Point, lines: Sequence[str], kind: str = "ink", **how: object) -> None:
        """Several lines of words, one below the other."""
        for number, words in enumerate(lines):
            self.text((at[0], at[1] + 17 * number), words, kind, **how)  # type: ignore[arg-type]

    def panel(self, corner: Point, size: Point, colour: str, title: str) -> None:
        """A place that belongs to a rank or a node, with its name in the upper left corner."""
        self._parts.append(
            f'<rect x="{corner[0]:g}" y="{corner[1]:g}" width="{size[0]:g}" height="{size[1]:g}" '
            f'rx="8" fill="{colour}" fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
        )
        at = (corner[0] + 12, corner[1] + 21)
        self.text(at, title, size=14, anchor="start", weight=600)

    def box(self, centre: Point, size: Point, words: str, colour: str | None = None) -> None:
        """A box with a word in it: full of a rank's colour, or an outline."""
        x, y = centre[0] - size[0] / 2, centre[1] - size[1] / 2
        fill = f'fill="{colour}"' if colour else 'class="ty-line" stroke-width="1.3"'
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{size[0]:g}" height="{size[1]:g}" rx="5" {fill}/>'
        )
        if words:
            self.text((centre[0], centre[1] + 4.8), words, "white" if colour else "ink")

    def number(self, at: Point, number: int) -> None:
        """The number of a step."""
        self._parts.append(f'<circle class="ty-ink" cx="{at[0]:g}" cy="{at[1]:g}" r="10"/>')
        style = 'style="fill: var(--ty-back, var(--md-default-bg-color))"'
        self._parts.append(
            f'<text {style} x="{at[0]:g}" y="{at[1] + 4.5:g}" font-size="13" font-weight="700" '
            f'text-anchor="middle">{number}</text>'
        )

    def arrow(
        self,
        points: Sequence[Point],
        colour: str | None = None,
        *,
        width: float = 1.8,
        dashed: bool = False,
        head: bool = True,
    ) -> None:
        """A line through the points, with a head at its end."""
        points = list(points)
        (x0, y0), (x1, y1) = points[-2:]
        angle = math.atan2(y1 - y0, x1 - x0)
        size = 5 + 2 * width
        tip, corners = points[-1], []
        for turn in (2.65, -2.65):
            corners.append(
                (tip[0] + size * math.cos(angle + turn), tip[1] + size * math.sin(angle + turn))
            )
        if head:  # the line ends inside the head, not at its tip
            points[-1] = (
                tip[0] - 0.6 * size * math.cos(angle),
                tip[1] - 0.6 * size * math.sin(angle),
            )
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        stroke = f'fill="none" stroke="{colour}"' if colour else 'class="ty-line"'
        self._parts.append(f'<path d="{path}" {stroke} stroke-width="{width:g}"{dash}/>')
        if head:
            fill = f'fill="{colour}"' if colour else 'class="ty-head"'
            three = " ".join(f"{x:.1f},{y:.1f}" for x, y in (tip, *corners))
            self._parts.append(f'<polygon points="{three}" {fill}/>')

    def slice(
        self, centre: Point, radii: Point, angles: Point, words: str, colour: str | None
    ) -> None:
        """A part of a ring, between two angles in degrees from the top, clockwise."""
        small, large = radii

        def at(radius: float, degrees: float) -> str:
            turn = math.radians(degrees - 90)
            x, y = centre[0] + radius * math.cos(turn), centre[1] + radius * math.sin(turn)
            return f"{x:.1f} {y:.1f}"

        begin, end = angles
        path = (
            f"M{at(large, begin)} A{large} {large} 0 0 1 {at(large, end)} "
            f"L{at(small, end)} A{small} {small} 0 0 0 {at(small, begin)} Z"
        )
        fill = f'fill="{colour}" ' if colour else ""
        self._parts.append(f'<path class="{"" if colour else "ty-line"}" d="{path}" {fill}/>')
        x, y = at((small + large) / 2, (begin + end) / 2).split()
        self.text((float(x), float(y) + 5), words, "white" if colour else "soft")
