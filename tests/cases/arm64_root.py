"""A Debian for ARM64 in a folder, with torch and this package, and programs in it under qemu.

Nothing of the machine changes: programs run in namespaces of their own, where the kernel is told to
start ARM64's programs by qemu (binfmt_misc of a user namespace, Linux 6.7 or newer). debootstrap
only fetches packages. They are unpacked, which is all that Python needs.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.cases import aarch64
from tests.cases.clock import scaled

QEMU = "qemu-aarch64-static"
TORCH = "2.10.0"  # the version whose wheel for ARM64 needs nothing of CUDA
_PACKAGES = "python3.11,libgomp1,libstdc++6"
# As they are here: what Numba keeps on disk belongs to its version.
_WHEELS = (
    *("numpy", "numba", "llvmlite", "pytest", "pytest-timeout", "iniconfig", "pluggy", "pygments"),
    *("packaging", "hypothesis", "sortedcontainers", "filelock", "typing_extensions", "sympy"),
    *("mpmath", "networkx", "jinja2", "markupsafe", "fsspec"),
)
_PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")

# By the first bytes of a program: 64 bits, little end first, an executable for ARM64.
_FORMAT = (
    r":arm64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:{}:F"
)
_NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")
_TELL = "mount -t binfmt_misc none /proc/sys/fs/binfmt_misc"
_ENTER = f"""
set -e
{_TELL}
printf '%s' "$2" > /proc/sys/fs/binfmt_misc/register
mount -t proc none "$1/proc"
for one in dev sys; do mount --rbind /$one "$1/$one"; done
mount -t tmpfs none "$1/tmp"
folder=$1
shift 2
exec chroot "$folder" "$@"
"""


def why_not() -> str | None:
    """Why no such root can be made and used here."""
    if os.geteuid() != 0 or platform.machine() != "x86_64" or sys.version_info[:2] != (3, 11):
        return "needs root, x86-64, and Python 3.11 as Debian 12 has it"
    for tool in ("debootstrap", QEMU, "dpkg", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is missing (Debian's packages debootstrap and qemu-user-static)"
    if subprocess.run(
        [*_NAMESPACES, "sh", "-c", _TELL], check=False, capture_output=True
    ).returncode:
        return "no binfmt_misc of a user namespace here (Linux 6.7 has it)"
    return None


def make(root: Path) -> None:
    """Unless it has been made: some minutes, and 1.3 GB."""
    site = root / "opt" / "site"
    if (site / "torch" / "version.py").exists():
        return
    shutil.rmtree(root, ignore_errors=True)
    _do("debootstrap", "--foreign", "--arch=arm64", "--variant=minbase", f"--include={_PACKAGES}",
        "bookworm", root)  # fmt: skip
    for package in sorted(root.glob("var/cache/apt/archives/*.deb")):
        _do("dpkg", "-x", package, root)
    wheels = [f"{name}=={version(name)}" for name in _WHEELS]
    _do(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:",
        "--python-version=3.11", *(f"--platform={one}" for one in _PLATFORMS),
        f"--target={site}", *wheels, f"torch=={TORCH}")  # fmt: skip


def _do(*command: str | Path) -> None:
    subprocess.run(command, check=True, timeout=scaled(1800), stdout=subprocess.DEVNULL)


def take_in(root: Path, compiled: Path) -> None:
    """Copy this package and its tests into the root, with kernels for ARM64: all those that a
    folder has for this machine.
    """
    inside = root / "opt" / "tokenyard"
    shutil.rmtree(inside, ignore_errors=True)
    for name in ("src", "tests"):
        shutil.copytree(
            aarch64.ROOT / name, inside / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(aarch64.ROOT / "pyproject.toml", inside)
    made_by = run(root, "-c", "import sys; print(sys.version, end='')", timeout=scaled(60))
    aarch64.run(
        *("keep-all", made_by, compiled),
        source=inside / "src",
        timeout=scaled(1800),
        NUMBA_CPU_NAME="generic",
        NUMBA_CACHE_DIR="",
    )


def run(root: Path, *arguments: str, timeout: float, **env: str) -> str:
    """What Python prints in the root, given these arguments."""
    done = subprocess.run(
        [*_NAMESPACES, "sh", "-c", _ENTER, "sh", root, _FORMAT.format(shutil.which(QEMU)),
         "/usr/bin/env", "-C", "/opt/tokenyard", "/usr/bin/python3.11", *arguments],
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "PYTHONPATH": "/opt/site:/opt/tokenyard/src",
            "NUMBA_CPU_NAME": "generic",
            "NUMBA_CPU_FEATURES": "",
            "TOKENYARD_TEST_SLOWNESS": "10",
            **env,
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout,
        check=True,
    )  # fmt: skip
    return done.stdout
