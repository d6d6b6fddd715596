"""The folder that makes `import deep_ep` mean tokenyard, for PYTHONPATH.

PYTHONPATH=$(python -m tokenyard.compat.deep_ep_path) python program.py

Nothing is installed by it, and a DeepEP that is installed is hidden for that run alone: a folder of
PYTHONPATH comes before installed packages, in processes that the program spawns too.
"""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """Beside this file where tokenyard was installed from a wheel, else in its repository."""
    here = Path(__file__).resolve().parent
    places = (here / "deep_ep_folder", here.parents[2] / "compat" / "deep_ep" / "src")
    for place in places:
        if (place / "deep_ep" / "__init__.py").is_file():
            return place
    raise FileNotFoundError(f"no deep_ep in {places[0]}, nor in {places[1]}")


if __name__ == "__main__":
    print(folder())
