"""Links between pages lead somewhere, and every page can be found from the site's navigation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]


def links(page: Path) -> list[tuple[Path, str]]:
    """The file and the heading of each link that stays in this repository."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            path, _, heading = target.partition("#")
            found.append(((page.parent / path).resolve() if path else page.resolve(), heading))
    return found


def headings(page: Path) -> set[str]:
    """As links name them: small letters, hyphens for spaces, nothing but letters and digits."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, heading in links(page):
        assert target.exists(), f"{page.name} links to {target}"
        assert not heading or heading in headings(target), f"{page.name} links to #{heading}"


def test_the_navigation_lists_every_page_once() -> None:
    _, _, nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")
    listed = re.findall(r"[\w/]+\.md", nav)
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in DOCS)


def test_pages_that_code_names_exist() -> None:
    for folder in ("src", "tests", "examples", "benchmarks", "tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".sh", ".md"):
                for name in re.findall(r"docs/[\w/]+\.md", path.read_text()):
                    assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


def test_files_that_answer_questions_exist() -> None:
    page = (ROOT / "docs" / "internals" / "where.md").read_text()
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", page):
        path = ROOT / name if name.startswith("src/") else ROOT / "src" / "tokenyard" / name
        assert path.exists(), f"where.md names {name}"
