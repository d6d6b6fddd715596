"""Which versions are installed, and whether tokenyard was made for them."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Iterator
from contextlib import suppress

from tokenyard import __version__
from tokenyard.tools.doctor.findings import BAD, OK, WARN, Finding

PART = "versions"
_SHOWN = ("torch", "numba", "llvmlite", "numpy", "triton")


def look() -> Iterator[Finding]:
    found = {}
    for name in _SHOWN:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding(OK, PART, f"tokenyard {__version__}, {python}; {listed}")
    try:
        wanted = importlib.metadata.requires("tokenyard") or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    for line in wanted:
        name, problem = unmet(line, found)
        if problem:
            yield Finding(
                BAD, PART, problem, f"pip install '{line}', and see docs/guide/install.md"
            )
            found.pop(name, None)
    if "triton" not in found and platform.system() == "Linux":
        advice = "GPUs need it: pip install triton; CPUs do not"
        yield Finding(OK, PART, "triton is not installed", advice)
    if platform.system() != "Linux":
        yield Finding(
            WARN,
            PART,
            f"ranks share no memory on {platform.system()}: rows go through gloo",
            "run on Linux for the fast transports",
        )


def unmet(requirement: str, found: dict[str, str]) -> tuple[str, str]:
    """The package that a requirement names, and how the installed version misses it, or "".

    >>> unmet("numba<0.69,>=0.65", {"numba": "0.70.1"})
    ('numba', 'numba is 0.70.1, want <0.69,>=0.65')
    >>> unmet("numba<0.69,>=0.65", {"numba": "0.68.1"})
    ('numba', '')
    """
    match = re.match(r"[\w.-]+", requirement)
    name = match.group() if match else requirement
    if ";" in requirement or name not in found:  # of an extra, or not looked at
        return name, ""
    bounds = requirement[len(name) :].strip()
    version = _numbers(found[name])
    for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", bounds):
        if (version >= _numbers(bound)) != (sign == ">="):
            return name, f"{name} is {found[name]}, want {bounds}"
    return name, ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
