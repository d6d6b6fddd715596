"""The network: which interface ranks would speak through, and how far that goes."""

from __future__ import annotations

from collections.abc import Iterator

from tokenyard.runtime import network
from tokenyard.tools.doctor.findings import BAD, WARN, Finding, read

PART = "network"


def look() -> Iterator[Finding]:
    found = network.interfaces()
    if found and not any(up for _, _, up in found.values()):
        yield Finding(
            BAD,
            PART,
            "no interface is up, not even the loopback: torch.distributed cannot start",
            "ip link set lo up (docker run without --network none); one rank works regardless",
        )
        return
    outward = [name for name, (_, loops, up) in found.items() if up and not loops]
    level, what, advice = network.of_gloo()
    yield Finding(level, PART, what, advice)
    if not outward:
        yield Finding(
            WARN,
            PART,
            "there is no interface but the loopback: ranks of other machines cannot be reached",
            "give the container a network (docker run --network host) for several machines",
        )
    elif not _has_default_route():
        yield Finding(
            WARN,
            PART,
            f"there is no default route; only machines on the network of {', '.join(outward)} "
            "can be reached",
            "add a route (ip route add default via GATEWAY) if other machines are elsewhere",
        )


def _has_default_route() -> bool:
    """True where the system does not tell."""
    table = read("/proc/net/route")
    if table is None:
        return True
    routes = [line.split() for line in table.splitlines()[1:]]
    return any(len(route) > 1 and route[1] == "00000000" for route in routes)
