"""The tree in docs/internals/design.md is that of today."""

from __future__ import annotations

from tools import tree


def test_the_page_has_the_tree_of_today() -> None:
    page = tree.PAGE.read_text()
    assert page == tree.page_with_tree(page), "run `python -m tools.tree --write`"


def test_every_file_says_what_it_is() -> None:
    for line in tree.tree().splitlines()[1:]:
        name, said = line.split(maxsplit=1)
        assert name
        assert len(said) > 5, line
