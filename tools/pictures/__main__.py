"""`python -m tools.pictures` names the pictures that are not as they are drawn; --write does it."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.pictures.concepts import PICTURES

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


def drawn() -> dict[Path, str]:
    """Every picture as it is drawn today, by its file."""
    return {FOLDER / f"{draw.__name__}.svg": draw().svg() for draw in PICTURES}


def stale() -> list[str]:
    return [
        path.name for path, svg in drawn().items() if not path.exists() or path.read_text() != svg
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/pictures/*.svg")
    if parser.parse_args().write:
        for path, svg in drawn().items():
            path.write_text(svg)
    for name in stale():
        print(name)


if __name__ == "__main__":
    main()
