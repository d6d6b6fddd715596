"""The time of an exchange in closed form, the link that binds it, and the memory that it takes.

    seconds = overhead + max(bytes copied in the node / node rate, bytes on the network / its rate)

Bytes are those of the busiest rank, and links carry both directions at once. The formula knows no
congestion between switches, no stragglers and no experts' compute; `docs/guide/planning.md` says
how far it is from published figures. Rates and overhead are what a kernel reaches, not the
manufacturer's: `presets` has them for some clusters, `fitted` says how they were found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from tokenyard.engine.balanced import shared_out
from tokenyard.planner.choices import Routing
from tokenyard.planner.traffic import (
    Rows,
    combine_row_bytes,
    dispatch_row_bytes,
    expected_rows,
)
from tokenyard.topology import Topology, even_split
from tokenyard.wire.message import MESSAGE_WORDS
from tokenyard.wire.node_blocks import LEAST_RANKS, block_words, most_messages

MODES = ("normal", "low_latency")
FP8_GROUP = 128  # elements that share a scale of 4 bytes
MESSAGE_BYTES = 8 * MESSAGE_WORDS  # what a rank tells every other rank before rows move
HEADER_BYTES = 16  # of a row in DeepEP's low-latency mode: the token's number


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines, by what a rank of them reaches."""

    name: str
    ranks_per_node: int
    node_rate: float  # bytes a second, of one rank, each way
    network_rate: float  # the same between nodes; ranks that share an adapter share its rate
    overhead: float  # seconds of a stage that moves nothing
    by_pair: bool = True  # low latency: a row for each expert (DeepEP), or one for each rank
    source: str = ""  # where the numbers come from


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of a model's MoE layers."""

    name: str
    hidden: int
    num_experts: int
    num_topk: int
    intermediate: int  # of one expert
    num_layers: int  # with experts
    num_groups: int = 1
    num_topk_groups: int = 1
    source: str = ""

    @property
    def expert_elements(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden * self.intermediate

    def routing(self) -> Routing:
        return Routing(
            num_experts=self.num_experts,
            num_topk=self.num_topk,
            num_groups=self.num_groups,
            num_topk_groups=self.num_topk_groups,
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a rank does in one layer."""

    num_tokens: int = 4096
    mode: str = "normal"
    fp8: bool = True  # dispatch, with a scale for each 128 elements; combine is BF16
    weight_bytes: int = 1  # of an element of the experts' weights

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}, want {' or '.join(MODES)}")
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens is {self.num_tokens}, want at least 1")

    def row_bytes(self, model: Model) -> tuple[int, int]:
        """Bytes of a row of dispatch, and of a row of combine."""
        wide = model.hidden * 2
        narrow = model.hidden if self.fp8 else wide
        scales = -(-model.hidden // FP8_GROUP) * 4 if self.fp8 else 0
        if self.mode == "low_latency":
            return narrow + scales + HEADER_BYTES, combine_row_bytes(wide)
        return dispatch_row_bytes(narrow, model.num_topk, scales), combine_row_bytes(wide)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage on the busiest rank."""

    name: str
    seconds: float
    bound_by: str  # "overhead", "node" or "network"
    bytes: dict[str, float]  # by link, of the rank that is busiest there


@dataclass(frozen=True, kw_only=True)
class Plan:
    cluster: Cluster
    model: Model
    work: Work
    num_ranks: int
    stages: list[Stage]
    memory: dict[str, float]  # bytes by part, of the rank that needs most
    imbalance: float  # rows of the busiest rank / rows of a rank on average
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds of a layer's exchange: all stages, one after the other."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def bound_by(self) -> str:
        """What binds the longest stage."""
        return max(self.stages, key=lambda stage: stage.seconds).bound_by

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        derived = {"seconds": self.seconds, "bound_by": self.bound_by}
        return {**asdict(self), **derived}


def route_of(cluster: Cluster, num_ranks: int, mode: str) -> str:
    """Low latency goes straight to ranks; the normal mode crosses the network once a node."""
    within = num_ranks <= cluster.ranks_per_node
    return "direct" if mode == "low_latency" or within else "two_level"


def slots_for(num_experts: int, num_ranks: int) -> int:
    """Slots of experts if every rank has as many: more than experts if ranks do not divide these.

    >>> slots_for(256, 64), slots_for(160, 64), slots_for(256, 1024)
    (256, 192, 1024)
    """
    return -(-num_experts // num_ranks) * num_ranks


def plan(
    cluster: Cluster,
    model: Model,
    num_ranks: int,
    work: Work | None = None,
    routing: Routing | None = None,
    rank_of_expert: Sequence[int] | np.ndarray | None = None,
) -> Plan:
    """What one MoE layer's exchange takes on a cluster.

    `routing` is the model's own if none is given. `rank_of_expert` has the rank of each of its
    experts. Without, each rank owns consecutive experts; if ranks do not divide experts, slots that
    are left over hold copies, tokens choose among slots as among experts, and a note says so.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}, want at least 1")
    work, notes = work or Work(), []
    routing = routing or model.routing()
    if rank_of_expert is None:
        slots = slots_for(routing.num_experts, num_ranks)
        if slots != routing.num_experts and routing.load is None:
            spare = slots - routing.num_experts
            notes.append(f"{spare} of {slots} slots hold copies, so that all ranks have as many")
            if slots % routing.num_groups:
                routing = replace(routing, num_groups=1, num_topk_groups=1)
                notes.append("experts are chosen without groups, which do not divide the slots")
            routing = replace(routing, num_experts=slots)
        owners = np.array(even_split(routing.num_experts, num_ranks))
    else:
        owners = np.asarray(rank_of_expert)
    topology = Topology.even(num_ranks, cluster.ranks_per_node)
    route = route_of(cluster, num_ranks, work.mode)
    by_pair = work.mode == "low_latency" and cluster.by_pair
    rows = expected_rows(routing, owners, topology, work.num_tokens, route, by_pair)
    if routing.load is not None:
        notes.append(_shared_out(routing, owners, topology, work.num_tokens))
    counts = np.bincount(owners, minlength=num_ranks)
    return Plan(
        cluster=cluster,
        model=model,
        work=work,
        num_ranks=num_ranks,
        stages=stages_of(cluster, model, work, rows, num_ranks),
        memory=memory_of(model, work, rows, int(counts.max())),
        imbalance=imbalance(rows.results),
        notes=notes,
    )


def _shared_out(routing: Routing, owners: np.ndarray, topology: Topology, num_tokens: int) -> str:
    """What a balance would do to the busiest rank's work, in words."""
    loads_R = np.bincount(owners, routing.load, topology.num_ranks)
    pairs = topology.num_ranks * num_tokens * routing.num_topk
    pairs_1R = np.rint(loads_R / loads_R.sum() * pairs).astype(np.int64)[None]
    busiest, _ = shared_out(pairs_1R, np.array(topology.node_of_rank))
    return (
        f"experts of the busiest rank compute {imbalance(pairs_1R):.2f} times the pairs of the "
        f'average, {busiest[0] / pairs_1R.mean():.2f} with Buffer(balance="exact")'
    )


def stages_of(
    cluster: Cluster, model: Model, work: Work, rows: Rows, num_ranks: int
) -> list[Stage]:
    """The stages of one call each of dispatch and combine. Low latency tells no counts."""
    out, back = work.row_bytes(model)
    stages = [_stage("dispatch", cluster, rows, out), _stage("combine", cluster, rows, back)]
    if work.mode == "low_latency":
        return stages
    return [_notify(cluster, model, num_ranks), *stages]


def _notify(cluster: Cluster, model: Model, num_ranks: int) -> Stage:
    """Every rank tells every other rank its counts, or many ranks tell them by nodes."""
    near = min(cluster.ranks_per_node, num_ranks)
    network = (num_ranks - near) * MESSAGE_BYTES
    if num_ranks >= LEAST_RANKS:
        width = 1 + -(-model.num_experts // num_ranks)
        network = 8 * most_messages(num_ranks, near) * block_words(near, width)
    told = {
        "itself": 0.0,
        "node": float((near - 1) * MESSAGE_BYTES),
        "network": float(network),
    }
    return _timed("notify", cluster, told, told["node"])


def _stage(name: str, cluster: Cluster, rows: Rows, row_bytes: int) -> Stage:
    moved = {link: number * row_bytes for link, number in rows.busiest().items()}
    return _timed(name, cluster, moved, rows.copied() * row_bytes)


def _timed(name: str, cluster: Cluster, moved: dict[str, float], copied: float) -> Stage:
    node, network = copied / cluster.node_rate, moved["network"] / cluster.network_rate
    longest = max(node, network)
    bound_by = "network" if network >= node else "node"
    if cluster.overhead > longest:
        bound_by = "overhead"
    return Stage(name=name, seconds=cluster.overhead + longest, bound_by=bound_by, bytes=moved)


def memory_of(model: Model, work: Work, rows: Rows, num_slots: int) -> dict[str, float]:
    """Bytes by part of the rank that needs most, in one layer; weights in all layers.

    The low-latency mode has a slot for every token of every rank at each expert, twice, as calls
    take turns with two sets.
    """
    out, back = work.row_bytes(model)
    weights = num_slots * model.expert_elements * work.weight_bytes
    tokens = work.num_tokens * model.hidden * 2
    parts = {
        "experts' weights, a layer": float(weights),
        "experts' weights, all layers": float(weights * model.num_layers),
        "tokens and their sums": 2.0 * tokens,
    }
    if work.mode == "low_latency":
        slots = num_slots * len(rows.results) * work.num_tokens
        parts["slots of dispatch"] = 2.0 * slots * out
        parts["slots of combine"] = 2.0 * slots * back
    else:
        most = float(rows.results.max())
        parts["received rows"] = most * out
        parts["experts' results"] = most * back
    return parts


def imbalance(rows_R: np.ndarray) -> float:
    """The rows of the busiest rank, divided by those of an average rank: 1.0 is even.

    >>> imbalance(np.array([1.0, 2.0, 3.0]))
    1.5
    """
    mean = float(rows_R.mean())
    return float(rows_R.max()) / mean if mean else 1.0
