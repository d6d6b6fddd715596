"""The network as gloo sees it: which interface ranks would speak through, and how far that goes.

gloo takes the interface that GLOO_SOCKET_IFNAME names, else the one whose address the host's name
has. Where that is the loopback, ranks of this machine meet, and no others.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from tokenyard.runtime import variables
from tokenyard.tools.doctor.findings import BAD, OK, WARN, Finding, read

PART = "network"
_ASK_ADDRESS, _ASK_FLAGS = 0x8915, 0x8913  # ioctls of Linux: SIOCGIFADDR, SIOCGIFFLAGS
_IS_UP, _IS_LOOPBACK = 0x1, 0x8
_HOWTO = "set GLOO_SOCKET_IFNAME"


def look() -> Iterator[Finding]:
    found = interfaces()
    if found and not any(up for _, _, up in found.values()):
        yield Finding(
            BAD,
            PART,
            "no interface is up, not even the loopback: torch.distributed cannot start",
            "ip link set lo up (docker run without --network none); one rank works regardless",
        )
        return
    outward = [name for name, (_, loops, up) in found.items() if up and not loops]
    yield from _gloo(found, outward)
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


def interfaces() -> dict[str, tuple[str, bool, bool]]:
    """Interfaces by name: IPv4 address or "", is it the loopback, is it up. Empty where unknown."""
    try:
        import fcntl
    except ImportError:
        return {}
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            given = struct.pack("256s", name[:15].encode())
            try:
                told = fcntl.ioctl(asked, _ASK_FLAGS, given)
                (flags,) = struct.unpack("H", told[16:18])
            except OSError:
                continue
            try:
                address = socket.inet_ntoa(fcntl.ioctl(asked, _ASK_ADDRESS, given)[20:24])
            except OSError:
                address = ""
            found[name] = address, bool(flags & _IS_LOOPBACK), bool(flags & _IS_UP)
    return found


def _gloo(found: dict[str, tuple[str, bool, bool]], outward: list[str]) -> Iterator[Finding]:
    advice = f"for several machines {_HOWTO}={outward[0]}" if outward else ""
    named = variables.read("GLOO_SOCKET_IFNAME")
    if named:
        # gloo takes several, separated by commas.
        missing = [one for one in named.split(",") if one not in found]
        if missing and found:
            what = f"GLOO_SOCKET_IFNAME names {missing[0]}, which is not an interface here"
            yield Finding(BAD, PART, what, f"{_HOWTO} to one of {', '.join(found)}")
            return
        addresses = ", ".join(found[one][0] or "no IPv4" for one in named.split(",") if found)
        yield Finding(OK, PART, f"gloo uses {named} ({addresses}), by GLOO_SOCKET_IFNAME")
        return
    host = socket.gethostname()
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
    except OSError as error:
        what = f"this host's name, {host}, has no address ({error.strerror}): gloo takes loopback"
        yield Finding(WARN, PART, what, advice)
        return
    at = next((name for name, (own, *_) in found.items() if own == address), None)
    if str(address).startswith("127."):
        what = f"this host's name, {host}, is {address}: gloo reaches ranks of this machine alone"
        yield Finding(WARN if outward else OK, PART, what, advice)
    elif at is None and found:
        what = f"this host's name, {host}, is {address}, which no interface here has"
        yield Finding(WARN, PART, what, advice)
    else:
        yield Finding(OK, PART, f"gloo uses {at or address}: {host} is {address}")


def _has_default_route() -> bool:
    """True where the system does not tell."""
    table = read("/proc/net/route")
    if table is None:
        return True
    routes = [line.split() for line in table.splitlines()[1:]]
    return any(len(route) > 1 and route[1] == "00000000" for route in routes)
