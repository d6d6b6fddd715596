"""What a benchmark found, as plain values that a JSON file keeps."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tokenyard
from tokenyard.tools.bench.timing import Timed

FORMAT = 1


@dataclass(frozen=True)
class Figure:
    """What one way took. `ours` tells tokenyard's ways from those it is measured beside."""

    way: str
    ours: bool
    timed: Timed


@dataclass(frozen=True)
class Measured:
    """What all ways of one case took."""

    label: str
    base: str
    num_bytes: int | None
    figures: list[Figure]

    def of(self, way: str) -> Timed | None:
        return next((one.timed for one in self.figures if one.way == way), None)

    def ratio(self, figure: Figure) -> float | None:
        """How many times as long as the base's this figure is."""
        base = self.of(self.base)
        return None if base is None else figure.timed.median / base.median


@dataclass(frozen=True)
class Report:
    """One run of one benchmark."""

    bench: str
    parameters: dict[str, Any]
    measured: list[Measured]
    transport: str | None = None
    absent: dict[str, str] = field(default_factory=dict)
    slow_rank: dict[str, Any] | None = None
    machine: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Report:
        """Raises ValueError for what no benchmark has written."""
        try:
            if given["format"] != FORMAT:
                raise ValueError(f"its format is {given['format']}, want {FORMAT}")
            rest = {name: value for name, value in given.items() if name != "format"}
            measured = [
                Measured(
                    one["label"],
                    one["base"],
                    one["num_bytes"],
                    [
                        Figure(each["way"], each["ours"], Timed(**each["timed"]))
                        for each in one["figures"]
                    ],
                )
                for one in rest.pop("measured")
            ]
            return cls(measured=measured, **rest)
        except (KeyError, TypeError) as error:
            raise ValueError("it holds no report of a benchmark") from error


def save(path: Path, reports: list[Report]) -> None:
    """One report as it is, several as a list."""
    plain: Any = [report.as_dict() for report in reports]
    path.write_text(json.dumps(plain[0] if len(plain) == 1 else plain, indent=1) + "\n")


def load(path: Path) -> list[Report]:
    """Raises ValueError where there are none, naming the file."""
    try:
        given = json.loads(path.read_text())
        if isinstance(given, dict):
            given = given.get("reports", [given])
        return [Report.from_dict(one) for one in given]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot use {path}: {error}") from error


def machine() -> dict[str, Any]:
    """Where and with what: what a reader needs to judge a figure."""
    import torch

    import tokenyard

    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "system": f"{platform.system()} {platform.release()}",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": _version("numba"),
        "tokenyard": tokenyard.__version__,
        "commit": commit(),
        "taken": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def processor() -> str:
    """The processor's name, as the system says it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the checkout that this package lies in; None where pip installed it."""
    here = Path(tokenyard.__file__).parents[2]
    if not (here / ".git").exists():
        return None
    asked = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "--short=10", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
