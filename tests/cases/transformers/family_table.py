"""Write the table of docs/guide/transformers_models.md.

`python -m tests.cases.transformers.family_table` does it.
"""

from __future__ import annotations

from pathlib import Path

from tests.cases.transformers.families import classes_of, walk
from tests.cases.transformers.family_checks import WORKS, classify

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "transformers_models.md"
HEADER = "| family | experts | model | |\n|---|---|---|---|\n"


def row_of(family: str) -> str:
    kinds, said = classes_of(family), []
    for kind in kinds:
        result, words = classify(family, kind)
        said.append(result if result == WORKS else f"{result}: {words}")
    cells = [family, _code(walk()[family]), _code([one.__name__ for one in kinds])]
    return f"| {' | '.join([*cells, ', '.join(dict.fromkeys(said))])} |"


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
    made = [row_of(family) for family in walk()]
    PAGE.write_text(before + HEADER + "\n".join([*made, *after]) + "\n")


if __name__ == "__main__":
    write()
