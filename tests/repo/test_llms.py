"""docs/llms.txt lists the pages of today."""

from __future__ import annotations

import pytest

from tools import llms


@pytest.mark.docs
def test_the_file_is_that_of_today() -> None:
    assert llms.FILE.read_text() == llms.text(), "run `python -m tools.llms --write`"


def test_every_page_is_listed_and_says_something() -> None:
    pages = {path.relative_to(llms.DOCS).as_posix() for path in llms.DOCS.rglob("*.md")}
    assert {entry.path for entry in llms.entries()} == pages
    for path in pages:
        assert len(llms.said(path)) > 15, path


def test_addresses_are_those_of_the_site() -> None:
    assert llms.address("guide/install.md") == "guide/install/"
    assert llms.address("reference/index.md") == "reference/"
    assert llms.address("index.md") == "./"
