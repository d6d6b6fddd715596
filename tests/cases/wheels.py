"""Wheels, and environments to install them in, without a package index."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

from tests.cases.clock import scaled

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, **settings: str) -> str:
    """What a command prints. `settings` are variables of its environment, which has no others that
    say where Python looks for modules.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        env={**inherited, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **settings},
        capture_output=True,
        text=True,
        timeout=scaled(200),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def build(project: Path, folder: Path) -> Path:
    """The wheel of a project of this repository."""
    folder.mkdir()
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir")
    run(sys.executable, "-m", "pip", "wheel", *options, folder, project)
    (wheel,) = folder.glob("*.whl")
    return wheel


def write(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """A wheel with these files."""
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    listed = "".join(f"{one},,\n" for one in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for where, text in {**files, f"{info}/RECORD": listed}.items():
            wheel.writestr(where, text)
    return path


class Environment:
    """A virtual environment that finds what this one has (torch) behind its own packages."""

    def __init__(self, folder: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self.python = folder / "bin" / "python"
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def pip(self, *command: str | Path) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, "--quiet", *command)

    def install(self, *wheels: Path) -> None:
        for wheel in wheels:  # one after the other, as a user might
            self.pip("install", "--no-deps", "--no-index", "--force-reinstall", wheel)

    def says(self, code: str, **settings: str) -> str:
        return run(self.python, "-c", code, **settings)
