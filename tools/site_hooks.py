"""What mkdocs is told besides mkdocs.yml: links out of docs/, and pictures.

Pages link to files of the repository as readers of the repository follow them
(`../../examples/train_moe.py`). The site has no repository around it, so every such file
becomes a page below `source/`, and the links lead there.

A picture of tools/pictures becomes a part of its page, where it has the colours of the site's
own switch between light and dark; in an `<img>` it would have those of the system.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # mkdocs runs this file by its path

from tools.pictures.canvas import ALONE  # noqa: E402

_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_IMAGE = re.compile(r'<p><img alt="([^"]*)" src="[^"]*pictures/(\w+)\.svg" ?/?></p>')
_LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make a page of every file outside docs/ to which a page links, and to which those link."""
    from mkdocs.structure.files import File

    waiting = [(f"docs/{one.src_uri}", one.content_string) for one in files.documentation_pages()]
    made: set[str] = set()
    while waiting:
        name, text = waiting.pop()
        for path in sorted(_linked(name, text) - made):
            made.add(path)
            content = _page_of(path)
            files.append(File.generated(config, f"{_place(path)}", content=content))
            if path.endswith(".md"):
                waiting.append((path, content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links that leave docs/ to the pages that `on_files` made."""
    place = page.file.src_uri
    name = place.removeprefix("source/") if place.startswith("source/") else f"docs/{place}"

    def led(found: re.Match[str]) -> str:
        before, target, heading, after = found.groups()
        path = _resolved(name, target)
        if path is None:
            return found.group()
        new = posixpath.relpath(_place(path), posixpath.dirname(place) or ".")
        return f"{before}{new}{heading or ''}{after}"

    return _LINK.sub(led, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put pictures into the page."""

    def drawn(found: re.Match[str]) -> str:
        svg = (ROOT / "docs" / "pictures" / f"{found.group(2)}.svg").read_text()
        if ALONE not in svg:  # drawn by something else: it stays an image, on white paper
            return found.group()
        width = re.search(r'viewBox="0 0 (\d+) ', svg)
        style = f"--ty-width: {width.group(1)}px" if width else ""
        return f'<figure class="ty-picture" style="{style}">{svg.replace(ALONE, "")}</figure>'

    return _IMAGE.sub(drawn, html)


def _linked(name: str, text: str) -> set[str]:
    """The files outside docs/ to which the page `name` links, as paths from the root."""
    paths = {_resolved(name, target) for _, target, _, _ in _LINK.findall(text)}
    return {path for path in paths if path is not None and not path.startswith("docs/")}


def _resolved(name: str, target: str) -> str | None:
    """A link's file as a path from the root; None if it is no file, or a link within docs/."""
    if "://" in target or target.startswith(("mailto:", "/")):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if name.startswith("docs/") and path.startswith("docs/"):
        return None
    return path if (ROOT / path).exists() else None


def _place(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _page_of(path: str) -> str:
    file = ROOT / path
    if file.is_dir():
        inside = "\n".join(
            f"- `{one.name}`" for one in sorted(file.iterdir()) if one.name[0] != "_"
        )
        return f"# {path}\n\n{inside}\n"
    if path.endswith(".md"):
        return file.read_text()
    language = _LANGUAGES.get(file.suffix, "text")
    return f"# {path}\n\n````{language}\n{file.read_text().rstrip()}\n````\n"
