"""Memory that ranks share: whether this process can make it and watch others, how much is left.

The check is the library's own: a page is made and named as a rank does it (`Probe`, by memfd and
/proc). Whether another process can map it is seen by `trial`, where two ranks do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from tokenyard import kernels
from tokenyard.errors import SharedMemoryError
from tokenyard.runtime import limits
from tokenyard.tools.doctor.findings import BAD, OK, WARN, Finding, read, size_text
from tokenyard.transports import Probe, why_not_shared

PART = "shared memory"
_LITTLE, _TOO_LITTLE = 2 << 30, 256 << 20  # bytes that are left


def look() -> Iterator[Finding]:
    yield from _sharing()
    yield from _left()


def _sharing() -> Iterator[Finding]:
    reason = why_not_shared(kernels.pick("auto", "cpu"))
    if reason is not None:
        yield Finding(WARN, PART, f"ranks cannot share memory: {reason}", "run on Linux")
        return
    try:
        Probe().close()
    except SharedMemoryError as error:
        yield Finding(BAD, PART, f"ranks cannot share memory: {error}", _remedy(error))
        return
    yield Finding(OK, PART, "memfd: this process can make memory that others map")
    try:
        os.close(os.pidfd_open(os.getpid()))
        yield Finding(OK, PART, "pidfd: this process can watch others")
    except OSError as error:
        what = f"ranks cannot watch each other (pidfd_open): {error.strerror}"
        yield Finding(BAD, PART, what, "allow pidfd_open in the container's seccomp profile")


def _remedy(error: SharedMemoryError) -> str:
    cause = error.__cause__
    if isinstance(cause, PermissionError):
        return "allow memfd_create in the container's seccomp profile (Docker's default does)"
    if "ulimit" in str(error) or "mount" in str(error):
        return "do what the message says; till then rows go through gloo, which is slower"
    return "till then rows go through gloo, which is slower"


def _left() -> Iterator[Finding]:
    left, machine = limits.available(), _of_machine()
    by = "its cgroup" if left < machine else "the machine"
    what = f"{size_text(left)} are left to this process, as {by} has it"
    if left > _LITTLE:
        yield Finding(OK, PART, what)
        return
    help_ = "free memory" if left >= machine else "raise it (docker run --memory)"
    yield Finding(
        BAD if left < _TOO_LITTLE else WARN,
        PART,
        what,
        f"{help_}; `tokenyard size` says what a Buffer takes",
    )


def _of_machine() -> int:
    """Bytes that the machine itself has left; as many as there can be where it does not say."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", read("/proc/meminfo") or "")
    return int(found.group(1)) * 1024 if found else 1 << 62
