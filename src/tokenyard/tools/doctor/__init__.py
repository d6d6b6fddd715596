"""What this machine, or this container, offers to ranks; what a Buffer would choose here and why.

    from tokenyard.tools.doctor import examine

    for finding in examine():
        print(finding.level, finding.part, finding.what, finding.advice)

Each module looks at one side of the machine, as the library itself uses it: `memory` maps memory of
another process the way ranks do, and `trial` opens a real Buffer on two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tokenyard.tools.doctor import gpus, limits, memory, network, processor, trial, versions
from tokenyard.tools.doctor.findings import BAD, Finding

__all__ = ["PARTS", "Finding", "examine"]

PARTS: dict[str, Callable[[], Iterator[Finding]]] = {
    "versions": versions.look,
    "processor": processor.look,
    "shared memory": memory.look,
    "limits": limits.look,
    "network": network.look,
    "GPUs": gpus.look,
}


def examine(
    *, with_trial: bool = True, on_part: Callable[[str], None] | None = None
) -> list[Finding]:
    """All findings, part by part; `on_part` hears of each part that is done.

    The trial starts two processes, and takes some seconds.
    """
    found: list[Finding] = []
    for name, look in PARTS.items():
        found += look()
        if on_part is not None:
            on_part(name)
    if with_trial:
        cut_off = any(one.part == network.PART and one.level == BAD for one in found)
        found += trial.skipped() if cut_off else trial.look()
        if on_part is not None:
            on_part(trial.PART)
    return found
