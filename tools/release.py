"""A release: its tag, its text, its files, and what they consist of.

    python -m tools.release check v0.1.0          # the tag fits the versions and the changelog
    python -m tools.release notes v0.1.0          # what the changelog says of it
    python -m tools.release build dist            # wheels and sdists of both distributions, checked
    python -m tools.release sbom dist sbom.json   # what an installation of them consists of

.github/workflows/release.yml runs these for a tag. `build` needs hatchling and twine, `sbom`
cyclonedx-bom; neither imports tokenyard or torch.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECTS = {"tokenyard": ROOT, "tokenyard-deep-ep": ROOT / "compat" / "deep_ep"}
CHANGELOG = ROOT / "CHANGELOG.md"


class NotReady(Exception):
    """Something of the repository does not fit the release that was asked for."""


def version() -> str:
    """As __init__ says it, read without importing torch."""
    text = (ROOT / "src" / "tokenyard" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def check(tag: str, changelog: str) -> None:
    """Raise NotReady unless this tag may be released."""
    if tag != f"v{version()}":
        raise NotReady(f"the tag is {tag}, but src/tokenyard/__init__.py says {version()}")
    if "dev" in version():
        raise NotReady(f"{version()} is not the version of a release")
    if not notes(tag, changelog).strip():
        raise NotReady(f"CHANGELOG.md says nothing of {version()}")


def check_pin(project: str) -> None:
    """Raise NotReady unless tokenyard-deep-ep asks for the tokenyard of its own version.

    `project` is the text of its pyproject.toml. Hatchling takes the version of both from one file,
    but dependencies only as they are written.
    """
    wanted = f'dependencies = ["tokenyard=={version()}"]'
    if wanted not in project.splitlines():
        raise NotReady(f"compat/deep_ep/pyproject.toml does not say {wanted}")


def notes(tag: str, changelog: str) -> str:
    """The part of the changelog between this version's heading and the next one."""
    heading = rf"^## {re.escape(tag.removeprefix('v'))} \(\d{{4}}-\d\d-\d\d\)$"
    found = re.search(heading, changelog, re.MULTILINE)
    if found is None:
        raise NotReady(f"CHANGELOG.md has no heading '## {tag.removeprefix('v')} (its date)'")
    return re.split(r"^## ", changelog[found.end() :], flags=re.MULTILINE)[0].strip() + "\n"


def build(folder: Path) -> list[Path]:
    """Wheel and sdist of each distribution, in a folder of its name, checked by twine."""
    made: list[Path] = []
    for name, project in PROJECTS.items():
        into = (folder / name).resolve()
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(into)]
        subprocess.run(command, cwd=project, check=True)
        made += sorted(into.iterdir())
    twine = [sys.executable, "-m", "twine", "check", "--strict", *(str(path) for path in made)]
    subprocess.run(twine, check=True)
    return made


def sbom(folder: Path, to: Path) -> None:
    """Install the wheels in an environment of their own, and list what came with them."""
    with tempfile.TemporaryDirectory() as made:
        python = Path(made) / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", made], check=True)
        wheels = [str(path) for path in folder.glob("*/*.whl")]
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *wheels]
        subprocess.run(pip, check=True)
        subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", "pip"], check=True)
        listed = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
        subprocess.run([*listed, "-o", str(to), str(python)], check=True)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("check", "notes"):
        commands.add_parser(name).add_argument("tag")
    commands.add_parser("build").add_argument("folder", type=Path)
    listing = commands.add_parser("sbom")
    listing.add_argument("folder", type=Path)
    listing.add_argument("to", type=Path)
    args = parser.parse_args(given)
    try:
        if args.command == "check":
            check(args.tag, CHANGELOG.read_text())
            check_pin((PROJECTS["tokenyard-deep-ep"] / "pyproject.toml").read_text())
        elif args.command == "notes":
            print(notes(args.tag, CHANGELOG.read_text()), end="")
        elif args.command == "build":
            build(args.folder)
        else:
            sbom(args.folder, args.to)
    except NotReady as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
