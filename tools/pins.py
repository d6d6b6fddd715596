"""The versions that .ci/run installs: .ci/pins.txt, made by one command.

    python -m tools.pins                  # all environments anew: some minutes, 5 GB
    python -m tools.pins --only gate      # vllm stays as it is
    python -m tools.pins --newer .ci/newest-venv    # what an environment has beside the file

It makes each environment with the newest versions that pyproject.toml, or vLLM, allows, and writes
down what pip installed. The versions of torch, of vLLM and of the callers are chosen by hand, in
the file itself. A raised version is a commit of its own, with .ci/run green.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / ".ci" / "pins.txt"
MADE = ("gate", "vllm")  # environments whose sections are written here
_OWN = ("tokenyard", "tokenyard-deep-ep")

Pins = dict[str, str]  # versions by name, in the spelling that pip compares


def read() -> dict[str, Pins]:
    """All sections of the file."""
    sections: dict[str, Pins] = {}
    for line in FILE.read_text().splitlines():
        if line.startswith("["):
            pins = sections[line.strip("[]")] = {}
        elif "==" in line:
            name, _, version = line.partition("==")
            pins[name] = version
    return sections


def write(sections: dict[str, Pins]) -> None:
    """Keep what stands before the first section, and write these."""
    head = FILE.read_text().split("[", 1)[0]
    parts = [
        "\n".join([f"[{section}]", *(f"{name}=={version}" for name, version in pins.items())])
        for section, pins in sections.items()
    ]
    FILE.write_text(head + "\n\n".join(parts) + "\n")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(environment: Path) -> Pins:
    """What pip has installed there, without what it built of this repository."""
    told = subprocess.run(
        [environment / "bin" / "pip", "list", "--format=freeze", "--exclude-editable"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pairs = (line.partition("==") for line in told.splitlines() if "==" in line)
    # A local part such as +cpu says where a wheel came from, and an index may not have it.
    found = {normal(name): version.partition("+")[0] for name, _, version in pairs}
    return {name: found[name] for name in sorted(found) if name not in _OWN}


def make(section: str) -> Pins:
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / section
        settings = {**os.environ, "TOKENYARD_CI_PINS": "0"}
        script = ROOT / ".ci" / f"{section}-env"
        subprocess.run([script, environment], env=settings, check=True)
        return installed(environment)


def compare(pinned: Pins, found: Pins) -> list[str]:
    """A line for each package that is of another version, new or gone.

    >>> compare({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "3"})
    ['b 1 -> 2', 'c 1 -> gone', 'd new -> 3']
    """
    return [
        f"{name} {pinned.get(name, 'new')} -> {found.get(name, 'gone')}"
        for name in sorted(pinned.keys() | found.keys())
        if pinned.get(name) != found.get(name)
    ]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", choices=MADE, help="make this environment alone")
    parser.add_argument("--newer", type=Path, help="compare an environment of .ci/gate-env")
    args = parser.parse_args(given)
    sections = read()
    if args.newer:
        print("\n".join(compare(sections["gate"], installed(args.newer))) or "nothing is newer")
        return
    for section in [args.only] if args.only else MADE:
        found = make(section)
        for line in compare(sections[section], found):
            print(f"{section}: {line}")
        sections[section] = found
    write(sections)


if __name__ == "__main__":
    main()
