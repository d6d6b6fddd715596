"""The table of docs/guide/transformers_models.md, written by running this module."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.cases.clock import scaled
from tests.cases.transformers import family_jobs
from tests.cases.transformers.families import classes_of, walk
from tests.cases.transformers.family_checks import WORKS, classify
from tokenyard.testing import Processes

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "transformers_models.md"
HEADER = "| family | experts | model | `expert_parallel` | one word |\n|---|---|---|---|---|\n"


def row_of(family: str, ranks: Processes) -> str:
    """ranks: two processes."""
    kinds, said, by_word = classes_of(family), [], []
    for which, kind in enumerate(kinds):
        result, words = classify(family, kind)
        said.append(result if result == WORKS else f"{result}: {words}")
        with tempfile.TemporaryDirectory() as path:
            by_word.append(ranks.run(family_jobs.by_one_word, family, which, path)[0])
    cells = [family, _code(walk()[family]), _code([one.__name__ for one in kinds])]
    cells += [", ".join(dict.fromkeys(words)) for words in (said, by_word)]
    return f"| {' | '.join(cells)} |"


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def rows() -> dict[str, str]:
    """The page's rows by family."""
    _, _, table = PAGE.read_text().partition(HEADER)
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return {line.split("|")[1].strip(): line for line in lines}


def experts() -> dict[str, list[str]]:
    """The page's classes of experts, by family."""
    return {
        family: [name.strip(" `") for name in line.split("|")[2].split(",")]
        for family, line in rows().items()
    }


def write() -> None:
    before, _, table = PAGE.read_text().partition(HEADER)
    after = [line for line in table.splitlines() if not line.startswith("|")]
    with Processes(2, timeout=scaled(300)) as ranks:
        made = [row_of(family, ranks) for family in walk()]
    PAGE.write_text(before + HEADER + "\n".join([*made, *after]) + "\n")


if __name__ == "__main__":
    write()
