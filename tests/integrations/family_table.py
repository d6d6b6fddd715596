"""The table of docs/transformers_models.md: python -m tests.integrations.family_table"""

from __future__ import annotations

from pathlib import Path

from tests.integrations.families import main_class, walk
from tests.integrations.family_checks import WORKS, classify

PAGE = Path(__file__).parents[2] / "docs" / "transformers_models.md"
HEADER = "| family | class | |\n|---|---|---|\n"


def row_of(family: str) -> str:
    result, words = classify(family)
    said = result if result == WORKS else f"{result}: {words}"
    return f"| {family} | `{main_class(family).__name__}` | {said} |"


def rows() -> dict[str, str]:
    """The page's rows by family."""
    _, _, table = PAGE.read_text().partition(HEADER)
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return {line.split("|")[1].strip(): line for line in lines}


def write() -> None:
    before, _, table = PAGE.read_text().partition(HEADER)
    after = [line for line in table.splitlines() if not line.startswith("|")]
    made = [row_of(family) for family in walk()]
    PAGE.write_text(before + HEADER + "\n".join([*made, *after]) + "\n")


if __name__ == "__main__":
    write()
