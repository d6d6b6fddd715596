"""Which ranks DeepEP V2 counts as a node, and how large a buffer it would ask for."""

from __future__ import annotations

from typing import NamedTuple

from tokenyard.topology import Topology
from tokenyard.types import round_up

ALIGNMENT = 2 << 20  # bytes, that of V2's sizes
_TOPK_BYTES = 8 + 4  # an index and a weight
_FP8_GROUP = 128


class Domains(NamedTuple):
    """Nodes, and ranks on each: as they are, and as combine treats them."""

    physical: tuple[int, int]
    logical: tuple[int, int]
    node_of_rank: tuple[int, ...] | None  # where combine sums by node, else None


def find_domains(topology: Topology, allow_hybrid_mode: bool, allow_sums: bool) -> Domains:
    """Nodes of different sizes, or whose ranks are not consecutive, count as one.

    >>> find_domains(Topology.even(4, 2), True, True)
    Domains(physical=(2, 2), logical=(2, 2), node_of_rank=(0, 0, 1, 1))
    >>> find_domains(Topology.even(4, 2), False, True)
    Domains(physical=(2, 2), logical=(1, 4), node_of_rank=None)
    >>> find_domains(Topology.of_sizes([3, 1]), True, True).physical
    (1, 4)
    """
    size, nodes = topology.num_ranks, topology.num_nodes
    physical = 1, size
    if size % nodes == 0 and topology == Topology.even(size, size // nodes):
        physical = nodes, size // nodes
    logical = physical if allow_hybrid_mode else (1, size)
    by_node = logical[0] > 1 and allow_sums
    return Domains(physical, logical, topology.node_of_rank if by_node else None)


def buffer_size(
    num_ranks: int,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int,
    use_fp8_dispatch: bool,
    allow_multiple_reduction: bool,
) -> int:
    """Bytes of what can arrive in one dispatch, and of what can come back in one combine.

    >>> buffer_size(2, 100, 1024, 8, False, True)
    2097152
    """
    num_topk = num_topk or num_ranks
    row = hidden + -(-hidden // _FP8_GROUP) * 4 if use_fp8_dispatch else hidden * 2
    arrives = num_ranks * num_max_tokens_per_rank * (row + num_topk * _TOPK_BYTES + 4)
    copies = min(num_topk, num_ranks) if allow_multiple_reduction else num_topk
    returns = num_max_tokens_per_rank * copies * (hidden * 2 + num_topk * 4)
    return round_up(max(arrives + returns, 1), ALIGNMENT)
