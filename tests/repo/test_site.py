"""The documentation site builds without a warning, and everything in it leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cases import site
from tests.cases.site import Html

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    said = site.build(folder)
    assert "WARNING" not in said, said
    return folder


@pytest.fixture(scope="module")
def pages(built: Path) -> dict[Path, Html]:
    return site.read(built)


def test_links_and_anchors_lead_somewhere(built: Path, pages: dict[Path, Html]) -> None:
    assert len(pages) > 25
    lost = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the server's root
            continue
        for link in [*page.links, *page.loaded]:
            found = site.target(path, link)
            if found is None:
                continue
            file, anchor = found
            if not file.exists() or (anchor and anchor not in pages[file].anchors):
                lost.append(f"{path.relative_to(built.resolve())}: {link}")
    assert not lost, lost


def test_llms_txt_names_pages_of_the_site(built: Path) -> None:
    addresses = re.findall(r"\]\(([^)]+)\)", (built / "llms.txt").read_text())
    assert len(addresses) > 25
    for address in addresses:
        assert (built / address / "index.html").exists(), address


def test_no_page_asks_another_server(pages: dict[Path, Html]) -> None:
    for path, page in pages.items():
        for link in page.loaded:
            assert not urlsplit(link).netloc, f"{path.name} loads {link}"
        for style in re.findall(r"url\(\s*['\"]?(https?:[^)]+)\)", path.read_text()):
            raise AssertionError(f"{path.name} loads {style}")


def test_every_page_has_one_title(pages: dict[Path, Html]) -> None:
    for path, page in pages.items():
        if path.name != "404.html":
            assert len(page.titles) == 1, f"{path.parent.name}: {page.titles}"
