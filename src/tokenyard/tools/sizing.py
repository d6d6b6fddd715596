"""How much memory a Buffer takes, part by part, before one is opened.

    from tokenyard.tools.sizing import Workload, parts

    work = Workload(num_tokens=4096, hidden=7168, num_topk=8, num_experts=64, num_ranks=8)
    for part in parts(work):
        print(part.name, part.num_bytes, part.why)

Figures are of one rank, and for one call at a time whose results are alive. Shared parts are
computed as the library itself computes its segments: exactly, unless a part says that it is the
most, but for 64 KiB or 128 that first calls take before sizes are known. Not counted are idle
memory that is kept for further calls, at most three quarters more than was in use of late
(`runtime.pool`); torch, gloo's own buffers, and code, which are some hundred MB a process.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tokenyard import validate
from tokenyard.engine.inputs import SMALL
from tokenyard.low_latency.places import control_bytes as mail_bytes
from tokenyard.low_latency.shape import SlotShape
from tokenyard.runtime.pool import size_class
from tokenyard.shm.control import ControlLayout
from tokenyard.shm.node import BOX
from tokenyard.shm.pool import KEPT
from tokenyard.topology import Placement, Topology
from tokenyard.transports.hierarchical import by_nodes
from tokenyard.transports.hierarchical.enclosed import most_staging
from tokenyard.transports.hierarchical.transport import box_of
from tokenyard.transports.ring import DEFAULT_BYTES
from tokenyard.types import round_up
from tokenyard.validate import SUMMABLE
from tokenyard.wire.columns import LINE, column_offsets
from tokenyard.wire.fp8 import NO_CAST, PLAIN

SHARED, OWN = "shared", "own"  # memory that ranks of a machine map, or of the process alone
TRANSPORTS = ("auto", "direct", "ring", "collective", "hierarchical")


class Part(NamedTuple):
    name: str
    num_bytes: int
    kind: str  # SHARED or OWN
    why: str
    is_exact: bool = True  # else it is the most that it can be


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a Buffer is to be used for. `num_tokens` is that of each rank in a call; in the
    low-latency mode it is num_max_dispatch_tokens_per_rank.
    """

    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    num_ranks: int
    num_nodes: int = 1
    dtype: torch.dtype = torch.bfloat16
    transport: str = "auto"
    low_latency: bool = False

    def __post_init__(self) -> None:
        for name in ("num_tokens", "hidden", "num_topk", "num_experts", "num_ranks", "num_nodes"):
            validate.integer(name, getattr(self, name), at_least=1)
        validate.require(
            self.num_topk <= self.num_experts,
            f"num_topk is {self.num_topk}, want at most num_experts ({self.num_experts})",
        )
        validate.require(
            self.num_ranks % self.num_nodes == 0,
            f"num_nodes is {self.num_nodes}, want a divisor of num_ranks ({self.num_ranks})",
        )
        validate.require(
            self.transport in TRANSPORTS,
            f"transport is {self.transport!r}, want one of {', '.join(TRANSPORTS)}",
        )
        validate.require(
            self.num_nodes == 1 or self.transport not in ("direct", "ring"),
            f"transport is {self.transport!r}, which serves one node, want auto, hierarchical or "
            f"collective for num_nodes={self.num_nodes}",
        )
        validate.require(
            self.dtype in SUMMABLE, f"dtype is {self.dtype}, want one that combine can sum"
        )

    @property
    def chosen(self) -> str:
        """The transport that "auto" takes where ranks of a node share memory."""
        if self.transport != "auto":
            return self.transport
        return "direct" if self.num_nodes == 1 else "hierarchical"

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    @property
    def widths(self) -> tuple[int, int, int]:
        """Bytes of a received row of x, of topk_idx and of topk_weights."""
        return self.row_bytes, 8 * self.num_topk, 4 * self.num_topk

    @property
    def placement(self) -> Placement:
        return Placement.even(self.num_experts, self.num_ranks)

    @property
    def even_rows(self) -> int:
        """Rows that a rank gets if every set of experts is as likely as any other.

        >>> shape = {"num_tokens": 4096, "hidden": 7168, "num_topk": 8, "num_experts": 64}
        >>> Workload(**shape, num_ranks=8).even_rows
        22252
        """
        elsewhere = self.num_experts - self.placement.most_experts
        missed = math.comb(elsewhere, self.num_topk) / math.comb(self.num_experts, self.num_topk)
        return math.ceil(self.most_rows * (1 - missed))

    @property
    def most_rows(self) -> int:
        """Rows that a rank gets if every token has an expert there."""
        return self.num_tokens * self.num_ranks


def parts(work: Workload, num_rows: int | None = None) -> list[Part]:
    """What a Buffer of one rank takes, if so many rows arrive in a dispatch; by default as many as
    with an even routing. Of the low-latency mode: what its calls take, and no others.
    """
    rows = work.even_rows if num_rows is None else num_rows
    if work.low_latency:
        return [*_words(work), *_low_latency(work)]
    return [*_words(work), *_exchange(work, rows)]


def total(found: list[Part], kind: str | None = None) -> int:
    return sum(one.num_bytes for one in found if kind in (None, one.kind))


def _words(work: Workload) -> Iterator[Part]:
    """Memory for messages between ranks of a node, for as long as the Buffer lives."""
    why = "messages and signals from every rank of the machine, for as long as the Buffer lives"
    if work.chosen in ("direct", "ring"):
        control = ControlLayout(work.num_ranks, BOX).num_bytes
        yield Part("messages", control, SHARED, why)
        if work.chosen == "ring":
            rings = max((DEFAULT_BYTES - control) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.PAGESIZE)
            yield Part(
                "rings",
                rings,
                SHARED,
                f"num_nvl_bytes, by default {DEFAULT_BYTES >> 20} MiB, less the messages: rows "
                "pass through it, however many there are",
            )
    elif work.chosen == "hierarchical":
        each = work.num_ranks // work.num_nodes
        topology = Topology.even(work.num_ranks, each)
        yield Part("messages", ControlLayout(each, box_of(topology, 0)).num_bytes, SHARED, why)


def _exchange(work: Workload, rows: int) -> Iterator[Part]:
    """Memory of a dispatch and a combine whose results are alive."""
    block = column_offsets(rows, work.widths)[-1]
    result, sums = rows * work.row_bytes, work.num_tokens * work.row_bytes
    shares = work.chosen in ("direct", "hierarchical")
    if work.chosen == "hierarchical":
        each = work.num_ranks // work.num_nodes
        parcel = work.num_tokens * (sum(work.widths) + each)
        topology = Topology.even(work.num_ranks, each)
        if not by_nodes.takes(topology):
            yield Part(
                "rows with messages",
                most_staging(topology, 0, parcel, result),
                SHARED,
                "rows of small calls travel with the words about them; large calls take none",
                False,
            )
    if shares:
        yield Part(
            "rows of a dispatch",
            size_class(block),
            SHARED,
            f"{rows} rows of x, topk_idx and topk_weights, which senders write where the receiver "
            "reads them; rounded up by an eighth at most",
        )
    else:
        yield Part("rows of a dispatch", block, OWN, f"{rows} rows of x, topk_idx and topk_weights")
    if work.chosen == "collective":
        copies = min(work.num_tokens * min(work.num_topk, work.num_ranks), rows)
        why = "torch.distributed moves rows from one buffer to another"
        yield Part("rows packed to be sent", copies * sum(work.widths), OWN, why, False)
        yield Part("rows packed to come back", result, OWN, why, False)
    if shares:
        yield Part(
            "rows for a combine",
            size_class(result) * (1 if result > KEPT else 2),
            SHARED,
            "a copy that other ranks can read of what experts gave as an ordinary tensor, two in "
            "turn if it is small; none if they write over many rows that arrived",
        )
    shares = shares and sums >= SMALL
    yield Part(
        "sums of a combine",
        size_class(sums) if shares else sums,
        SHARED if shares else OWN,
        f"{work.num_tokens} tokens of {work.hidden}",
    )


def _low_latency(work: Workload) -> Iterator[Part]:
    shared = work.chosen in ("direct", "ring")
    kind = SHARED if shared else OWN
    shape = _slots(work, PLAIN if _casts(work) else NO_CAST)
    back = work.num_ranks * (shape.firsts_bytes + shape.most_back * work.row_bytes)
    if shared:
        why = "messages, by which ranks tell of calls, for as long as the Buffer lives"
        yield Part("low latency: messages", mail_bytes(work.num_ranks), SHARED, why)
    told = "FP8 with scales" if _casts(work) else str(work.dtype).removeprefix("torch.")
    yield Part(
        "low latency: blocks sent",
        2 * size_class(shape.block_bytes),
        kind,
        f"room for {work.num_tokens} tokens in {told} and their topk_idx, for even and odd calls",
        shared,
    )
    result = round_up(shape.num_local * shape.num_slots * shape.row_bytes, LINE)
    result += shape.num_local * shape.num_slots * shape.scale_bytes
    yield Part(
        "low latency: results",
        2 * size_class(result),
        OWN,
        f"{shape.num_local} experts with {shape.num_slots} slots each, one for every token of "
        "every rank, of two calls; pages of slots that hold nothing are never touched",
        False,
    )
    yield Part(
        "low latency: rows back",
        2 * size_class(back),
        kind,
        "rows that experts give back, for even and odd calls; as many as there are, and twice that",
        False,
    )


def _casts(work: Workload) -> bool:
    """Whether a dispatch is as DeepEP's by default, in FP8."""
    return work.dtype == torch.bfloat16 and work.hidden % 128 == 0


def _slots(work: Workload, cast: int) -> SlotShape:
    return SlotShape(
        rank=0,
        num_ranks=work.num_ranks,
        num_max=work.num_tokens,
        hidden=work.hidden,
        num_topk=work.num_topk,
        dtype=work.dtype,
        cast=cast,
        placement=work.placement,
    )
