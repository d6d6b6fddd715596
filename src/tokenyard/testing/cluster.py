"""A cluster in a box: nodes that are network namespaces, joined by a bridge, with ranks in them.

    with Cluster([2, 2], rate="1gbit") as cluster:      # two nodes of two ranks
        results = cluster.run(job, *args)               # as Processes.run
        cluster.lose(0.01)                              # every hundredth packet from now on
        cluster.cut(1)                                  # node 1 is alone, until heal()

Ranks use TCP through their node's own interface, whose counters tell what crossed the network. All
ranks share one machine, and could map each other's memory whatever their node: so give
`ranks_per_node=cluster.sizes` to the Buffer. A cluster needs root, Linux, iproute2 and nftables;
`why_no_cluster()` says what is missing. It does not touch the machine's own network: its addresses
exist in its namespaces only, which are removed when it is closed. The next cluster removes what a
killed process left behind.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tokenyard.testing.processes import Processes, Seat

_PREFIX = "tokenyard"
_INTERFACE = "eth0"
_NAMESPACES = Path("/var/run/netns")


def why_no_cluster() -> str | None:
    """Why this process cannot make a cluster; None if it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "namespaces need root"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nft", "nftables")):
        if shutil.which(tool) is None:
            return f"there is no {tool} (of {package})"
    name = f"{_PREFIX}-{os.getpid()}-try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
    except RuntimeError as error:
        return str(error)
    return None


class Cluster(Processes):
    """Nodes of these sizes. `rate`, as tc has it ("1gbit"), limits what each node sends."""

    def __init__(
        self, sizes: Sequence[int], *, rate: str | None = None, timeout: float = 60.0
    ) -> None:
        self.sizes = list(sizes)
        tag = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(2)}"
        self._bridge = f"{tag}-bridge"
        self._nodes = [f"{tag}-{node}" for node in range(len(sizes))]
        self._addresses = [f"10.77.0.{node + 1}" for node in range(len(sizes))]
        _remove_left_behind()
        self._remove = weakref.finalize(self, _remove, [*self._nodes, self._bridge])
        try:
            self._join(rate)
            seats = [
                Seat(str(_NAMESPACES / name), _INTERFACE, self._addresses[0])
                for name, size in zip(self._nodes, sizes)
                for _ in range(size)
            ]
            super().__init__(len(seats), timeout=timeout, seats=seats)
        except BaseException:
            self._remove()
            raise

    def close(self) -> None:
        """End all ranks, and take the network away."""
        super().close()
        self._remove()

    def ranks_of(self, node: int) -> range:
        """The ranks that live on a node."""
        first = sum(self.sizes[:node])
        return range(first, first + self.sizes[node])

    def address(self, node: int) -> str:
        """The IP address of a node, inside the cluster."""
        return self._addresses[node]

    def command(self, node: int, *words: str) -> list[str]:
        """A command that runs on a node, for subprocess; GLOO_SOCKET_IFNAME should be eth0."""
        return ["ip", "netns", "exec", self._nodes[node], *words]

    def bytes_sent(self) -> list[int]:
        """Bytes that each node's interface has sent so far, headers included."""
        counts = []
        for name in self._nodes:
            said = _run("ip", "-n", name, "-s", "-j", "link", "show", _INTERFACE)
            counts.append(int(json.loads(said)[0]["stats64"]["tx"]["bytes"]))
        return counts

    def lose(self, share: float) -> None:
        """Drop this share of the packets that reach a node, at random; 0 ends it."""
        for name in self._nodes:
            with suppress(RuntimeError):
                self._nft(name, "delete table inet loss")
            if share > 0:
                self._nft(name, "add table inet loss")
                self._nft(name, "add chain inet loss in { type filter hook input priority 0 ; }")
                rule = f"numgen random mod 10000 < {round(share * 10000)} counter drop"
                self._nft(name, f"add rule inet loss in iif {_INTERFACE} {rule}")

    def lost(self) -> int:
        """Packets dropped since `lose`."""
        said = [self._nft(name, "list table inet loss") for name in self._nodes]
        return sum(int(found) for text in said for found in re.findall(r"packets (\d+)", text))

    def cut(self, node: int) -> None:
        """Silently drop all packets between this node and the others, until `heal`."""
        self._cross(node, "add")

    def heal(self, node: int) -> None:
        """Let packets through again after `cut`."""
        self._cross(node, "del")

    def kill(self, node: int) -> None:
        """Kill all ranks of a node at once."""
        for rank in self.ranks_of(node):
            self.processes[rank].kill()

    def _join(self, rate: str | None) -> None:
        _run("ip", "netns", "add", self._bridge)
        _run("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._bridge, "link", "set", "bridge", "up")
        for node, name in enumerate(self._nodes):
            _run("ip", "netns", "add", name)
            port = f"port{node}"
            ends = ("netns", name, "type", "veth", "peer", "name", port, "netns", self._bridge)
            _run("ip", "link", "add", _INTERFACE, *ends)
            _run("ip", "-n", self._bridge, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"{self._addresses[node]}/24", "dev", _INTERFACE)
            _run("ip", "-n", name, "link", "set", _INTERFACE, "up")
            if rate is not None:
                limit = ("rate", rate, "burst", "256kb", "latency", "50ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", _INTERFACE, "root", "tbf", *limit)

    def _cross(self, node: int, verb: str) -> None:
        for other, name in enumerate(self._nodes):
            if other != node:
                there = f"{self._addresses[other]}/32"
                back = f"{self._addresses[node]}/32"
                _run("ip", "-n", self._nodes[node], "route", verb, "blackhole", there)
                _run("ip", "-n", name, "route", verb, "blackhole", back)

    @staticmethod
    def _nft(name: str, command: str) -> str:
        return _run("ip", "netns", "exec", name, "nft", command)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _remove(names: Sequence[str]) -> None:
    """Interfaces and rules go with their namespaces."""
    for name in names:
        with suppress(RuntimeError):
            _run("ip", "netns", "del", name)


def _remove_left_behind() -> None:
    """Namespaces of processes that are no more."""
    for path in _NAMESPACES.glob(f"{_PREFIX}-*"):
        pid = path.name.split("-")[1]
        if not Path("/proc", pid).exists():
            _remove([path.name])
