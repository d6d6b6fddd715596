"""The network as gloo sees it: which interface ranks would speak through, and how far that goes.

gloo takes the interface that GLOO_SOCKET_IFNAME names, else the one whose address the host's name
has. Where that is the loopback, ranks of this machine meet, and no others.
"""

from __future__ import annotations

import re
import socket
import struct

from tokenyard.runtime import variables

_ASK_ADDRESS, _ASK_FLAGS = 0x8915, 0x8913  # ioctls of Linux: SIOCGIFADDR, SIOCGIFFLAGS
_IS_UP, _IS_LOOPBACK = 0x1, 0x8
_HOWTO = "set GLOO_SOCKET_IFNAME"


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


def of_gloo() -> tuple[str, str, str]:
    """How well gloo's choice serves several machines ("ok", "warn" or "bad"), what it is, and what
    would help, or "".
    """
    found = interfaces()
    outward = [name for name, (_, loops, up) in found.items() if up and not loops]
    advice = f"for several machines {_HOWTO}={outward[0]}" if outward else ""
    named = variables.read("GLOO_SOCKET_IFNAME")
    if named:
        # gloo takes several, separated by commas.
        missing = [one for one in named.split(",") if one not in found]
        if missing and found:
            what = f"GLOO_SOCKET_IFNAME names {missing[0]}, which is not an interface here"
            return "bad", what, f"{_HOWTO} to one of {', '.join(found)}"
        addresses = ", ".join(found[one][0] or "no IPv4" for one in named.split(",") if found)
        return "ok", f"gloo uses {named} ({addresses}), by GLOO_SOCKET_IFNAME", ""
    host = socket.gethostname()
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
    except OSError as error:
        what = f"this host's name, {host}, has no address ({error.strerror}): gloo takes loopback"
        return "warn", what, advice
    at = next((name for name, (own, *_) in found.items() if own == address), None)
    if str(address).startswith("127."):
        what = f"this host's name, {host}, is {address}: gloo reaches ranks of this machine alone"
        return "warn" if outward else "ok", what, advice
    if at is None and found:
        return (
            "warn",
            f"this host's name, {host}, is {address}, which no interface here has",
            advice,
        )
    return "ok", f"gloo uses {at or address}: {host} is {address}", ""


def why_not_connected(error: RuntimeError) -> str:
    """What to say of gloo's error where it could not connect the ranks; "" of other errors."""
    if not re.search("connectFullMesh|Unable to find address", str(error)):
        return ""
    return "; ".join(filter(None, ("gloo could not connect the ranks", *of_gloo()[1:])))
