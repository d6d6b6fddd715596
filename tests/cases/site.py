"""The documentation site, built once, and what its pages link to."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.cases.clock import scaled

ROOT = Path(__file__).parents[2]


def build(folder: Path) -> str:
    """Build the site into a folder, and return what mkdocs said: warnings are its errors."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=scaled(200),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@dataclass
class Html(HTMLParser):
    """What a page links to, what it loads by itself, and the anchors that it has."""

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    titles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if given.get("id"):
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and "href" in given:
            self.loaded.append(given["href"])
        elif tag in ("script", "img", "iframe", "source") and "src" in given:
            self.loaded.append(given["src"])
        elif tag == "h1":
            self.titles.append(given.get("id", ""))


def read(folder: Path) -> dict[Path, Html]:
    """Every page of a built site."""
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        pages[path.resolve()] = page = Html()
        page.feed(path.read_text())
    return pages


def target(page: Path, link: str) -> tuple[Path, str] | None:
    """The file of the site and the anchor to which a link leads; None if it leaves the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    return (path / "index.html" if path.is_dir() else path), unquote(parts.fragment)
