"""The pictures in docs/pictures are those that tools/pictures draws."""

from __future__ import annotations

from xml.etree import ElementTree

from tools.pictures.__main__ import drawn, stale
from tools.pictures.canvas import ALONE


def test_pictures_are_those_of_today() -> None:
    assert not stale(), "run `python -m tools.pictures --write`"


def test_pictures_stay_inside_their_paper() -> None:
    """Boxes and the beginnings of words; and a title for those who hear the page."""
    for path, svg in drawn().items():
        root = ElementTree.fromstring(svg)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        assert root.findtext("{*}title"), path.name
        assert ALONE in svg
        for node in root.iter():
            x, y = float(node.get("x", 0)), float(node.get("y", 0))
            right, low = x + float(node.get("width", 0)), y + float(node.get("height", 0))
            assert 0 <= x <= right <= width, (path.name, node.attrib)
            assert 0 <= y <= low <= height, (path.name, node.attrib)
