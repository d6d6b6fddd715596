"""How time, memory, messages and connections grow with ranks: what docs/internals/scale.md shows.

    python -m tools.scale                  # virtual ranks to 512, in nodes of 8
    python -m tools.scale --hierarchical   # the same through the memory of nodes
    python -m tools.scale --processes      # real processes to 64
    python -m tools.scale --connections    # the sockets that each of them holds
    python -m tools.scale --count          # messages and connections of any number of ranks
    python -m tools.scale --plot FILE      # and drawn

Every rank dispatches and combines 8 tokens with 8 of as many experts as there are ranks. Each
number of ranks has a process of its own, which has loaded its kernels before.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any, NamedTuple

import torch

import tokenyard
from tokenyard.planner.cost import MESSAGE_BYTES
from tokenyard.testing import Processes, run_virtual
from tokenyard.wire import node_blocks

TOKENS, TOPK, HIDDEN, NODE = 8, 8, 128, 8


def job(group: Any, transport: str, calls: int, ranks_per_node: int = NODE) -> dict[str, Any]:
    """Moments at which this rank has opened its Buffer, dispatched and combined; and had begun."""
    rank, size = group.rank(), group.size()
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16()
    topk_idx = torch.rand(TOKENS, size, generator=random).topk(TOPK, dim=1).indices
    weights = torch.ones(TOKENS, TOPK)
    moments, begin = [], time.perf_counter()
    with tokenyard.Buffer(
        group, transport=transport, ranks_per_node=ranks_per_node, timeout=300.0
    ) as buffer:
        moments.append(time.perf_counter())
        for _ in range(calls):
            got: Any = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=size)
            moments.append(time.perf_counter())
            buffer.combine(got.recv_x, got.handle)
            moments.append(time.perf_counter())
        memory = sum(buffer.stats()["memory"].values())
    return {"moments": [*moments, begin], "memory": memory}


def measure(num_ranks: int, transport: str) -> dict[str, Any]:
    """One number of ranks, in this process."""
    torch.set_num_threads(1)
    run_virtual(job, NODE, transport, 1, timeout=600)  # kernels are loaded
    resident, cpu, begin = _resident(), time.process_time(), time.perf_counter()
    run = run_virtual(job, num_ranks, transport, 1, timeout=600)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    ends = [begin, *(max(at) for at in zip(*(one["moments"][:-1] for one in run.results)))]
    opening, dispatch, combine = (after - before for before, after in pairwise(ends))
    others = ~torch.eye(num_ranks, dtype=torch.bool)
    return {
        "ranks": num_ranks,
        "seconds": seconds,
        "cpu": cpu,
        "opening": opening,
        "dispatch": dispatch,
        "combine": combine,
        "resident": _resident() - resident,
        "memory": max(one["memory"] for one in run.results),
        "messages": {
            stage: float((sent * others > 0).sum()) / num_ranks
            for stage, sent in run.bytes_sent.items()
        },
        "bytes": {
            stage: float((sent * others).sum()) / num_ranks
            for stage, sent in run.bytes_sent.items()
        },
    }


def _resident() -> float:
    """The most bytes that this process has held."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Counted(NamedTuple):
    """Of one rank at most, for a call and for a Buffer over gloo."""

    messages: int  # of an agreement, with an expert on each rank
    message_bytes: int  # of them all
    connections: int  # beside those of the group


def count(
    num_ranks: int,
    transport: str,
    ranks_per_node: int = NODE,
    least_ranks: int = node_blocks.LEAST_RANKS,
) -> Counted:
    """What follows from the design; `tests/transports/test_scale.py` holds it against ranks.
    From `least_ranks` on they agree by nodes.
    """
    others, num_nodes = num_ranks - 1, -(-num_ranks // ranks_per_node)
    local = min(ranks_per_node, num_ranks)
    if transport == "collective":
        return Counted(others, others * MESSAGE_BYTES, others)
    # A message to a node has the words for all its ranks. Messages and rows have a connection each,
    # and the ranks of the node have met over some.
    far = num_nodes - 1
    connections = local - 1 + 2 * far
    if far > 0 and num_ranks >= least_ranks:  # by nodes: a block for every two of them
        messages = node_blocks.most_messages(num_ranks, local)
        return Counted(messages, messages * 8 * node_blocks.block_words(local, 2), connections)
    return Counted(far, far * local * MESSAGE_BYTES, connections)


def ring(num_ranks: int) -> int:
    """Connections of a rank that has only told all ranks the same, as in opening a Buffer."""
    return min(2, num_ranks - 1)


def of_group(num_ranks: int, is_lazy: bool) -> int:
    """Connections of a rank to others of the process group: gloo's under TORCH_GLOO_LAZY_INIT=1."""
    return ring(num_ranks) if is_lazy else num_ranks - 1


def sockets(group: Any, transport: str, ranks_per_node: int, is_lazy: bool = False) -> int:
    """How many connections to other ranks this process holds once a Buffer is open on all, and has
    moved rows. Those of a Buffer before may take a moment to close: the count when it has stopped
    to change. `is_lazy`: over a group that makes its connections lazily, without those of this one.
    """
    if is_lazy:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        lazy = torch.distributed.new_group(backend="gloo")
        del os.environ["TORCH_GLOO_LAZY_INIT"]
        try:
            return sockets(lazy, transport, ranks_per_node) - (group.size() - 1)
        finally:
            torch.distributed.destroy_process_group(lazy)
    with tokenyard.Buffer(group, transport=transport, ranks_per_node=ranks_per_node) as buffer:
        buffer.all_gather(torch.zeros(1, 1))  # all have opened theirs
        counts = [_established()]
        while len(counts) < 10 or (len(set(counts[-10:])) > 1 and len(counts) < 200):
            time.sleep(0.05)
            counts.append(_established())
        buffer.all_gather(torch.zeros(1, 1))  # all have counted, and may close
        return counts[-1]


def _established() -> int:
    held = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            held.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # closed meanwhile
            continue
    found = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            for line in list(file)[1:]:
                words = line.split()
                found += words[3] == "01" and f"socket:[{words[9]}]" in held
    return found


def show(*cells: object) -> None:
    """A row of a table in Markdown."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def show_processes() -> None:
    """The slowest rank's opening, and the median of its calls."""
    show("ranks", "transport", "opening, s", "dispatch and combine, ms")
    calls = 12
    for num_ranks in (8, 16, 32, 64):
        with Processes(num_ranks, timeout=600) as ranks:
            for transport in ("direct", "hierarchical", "collective"):
                near = num_ranks if transport == "direct" else NODE
                ranks.run(job, transport, 1, near)  # kernels are loaded, ranks have started
                run = [one["moments"] for one in ranks.run(job, transport, calls, near)]
                opening = max(one[0] - one[-1] for one in run)
                each = max(statistics.median(b - a for a, b in pairwise(one[:-1:2])) for one in run)
                show(num_ranks, transport, f"{opening:.2f}", f"{1e3 * each:.1f}")


def show_connections() -> None:
    show("ranks", "transport", "group", "connections of ranks, in nodes of 2")
    for num_ranks in (2, 4, 8):
        with Processes(num_ranks, timeout=120) as ranks:
            for transport in ("collective", "hierarchical"):
                for is_lazy in (False, True):
                    kind = "lazy" if is_lazy else "eager"
                    show(num_ranks, transport, kind, ranks.run(sockets, transport, 2, is_lazy))


def show_counts() -> None:
    show(
        "ranks",
        "transport",
        "messages",
        "bytes",
        "connections",
        "with a lazy group",
        "not by nodes",
    )
    for num_ranks in (8, 64, 512, 2048, 10_000):
        for transport in ("collective", "hierarchical"):
            one = count(num_ranks, transport)
            size = f"{one.message_bytes / 1e6:.2f} MB"
            held = [one.connections + of_group(num_ranks, is_lazy) for is_lazy in (False, True)]
            before = count(num_ranks, transport, least_ranks=1 << 62)
            old = f"{before.messages}, {before.message_bytes / 1e6:.2f} MB"
            show(num_ranks, transport, one.messages, size, *held, old)


def plot(path: str) -> None:
    """Connections, and bytes of an agreement, against ranks."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    ranks = [16 * 2**power for power in range(10)] + [10_000]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for transport, colour in (("collective", "tab:orange"), ("hierarchical", "tab:blue")):
        counted = [count(number, transport) for number in ranks]
        for is_lazy, style in ((False, "-"), (True, ":")):
            held = [one.connections + of_group(n, is_lazy) for n, one in zip(ranks, counted)]
            left.plot(ranks, held, color=colour, linestyle=style, label=transport)
        sizes = [one.message_bytes / 1e6 for one in counted]
        right.plot(ranks, sizes, color=colour, label=transport)
    left.axhline(1024, color="grey", linewidth=0.8, linestyle="--")
    left.text(17, 1150, "1,024 open files, a usual limit", fontsize=8, color="grey")
    left.set(title="connections of a rank; dotted: over a lazy group", xlabel="ranks")
    right.set(title="MB that a rank sends in an agreement", xlabel="ranks")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlim=(16, 10_000))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False)
    figure.savefig(path, dpi=120)


def show_runs(transport: str, most: int) -> None:
    seconds = ("all", "CPU", "opening", "dispatch", "combine")
    show("ranks", *(f"{name}, s" for name in seconds), "process, MB", "Buffer, MB a rank")
    messages = []
    for num_ranks in (8, 16, 32, 64, 128, 256, 512):
        if num_ranks > most:
            break
        command = [sys.executable, "-m", "tools.scale", "--one", str(num_ranks), transport]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        one = json.loads(done.stdout.splitlines()[-1])
        taken = (f"{one[name]:.2f}" for name in ("seconds", "cpu", *seconds[2:]))
        show(num_ranks, *taken, f"{one['resident'] / 1e6:.0f}", f"{one['memory'] / 1e6:.2f}")
        messages.append((num_ranks, one["messages"], one["bytes"]))
    stages = ("dispatch (notify)", "dispatch", "combine (notify)", "combine")
    print()
    show("ranks", *(f"{stage}: messages, kB a rank" for stage in stages))
    for num_ranks, number, sent in messages:
        told = [(number.get(stage, 0.0), sent.get(stage, 0.0) / 1e3) for stage in stages]
        show(num_ranks, *(f"{times:.1f}, {size:.1f}" for times, size in told))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hierarchical", action="store_true", help="through the nodes' memory")
    parser.add_argument("--processes", action="store_true", help="real ones, to 64")
    parser.add_argument("--connections", action="store_true", help="of real processes")
    parser.add_argument("--count", action="store_true", help="for 8 to 10,000 ranks, without them")
    parser.add_argument("--plot", metavar="FILE", help="connections and messages that are counted")
    parser.add_argument("--most", type=int, help="virtual ranks; 512")
    parser.add_argument("--one", nargs=2, metavar=("RANKS", "TRANSPORT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(int(args.one[0]), args.one[1])))
    elif args.processes:
        show_processes()
    elif args.connections:
        show_connections()
    elif args.count:
        show_counts()
    elif args.plot:
        plot(args.plot)
    elif args.hierarchical:
        show_runs("hierarchical", args.most or 512)
    else:
        show_runs("collective", args.most or 512)


if __name__ == "__main__":
    main()
