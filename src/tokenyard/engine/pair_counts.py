"""How many pairs every expert gets from every rank, and where their rows begin.

Before a dispatch by expert every rank tells all others the same row of integers: how many rows each
rank gets of it, how many (token, k) pairs each expert gets, and its own expert_alignment. So every
rank can tell where each of its pairs belongs in the memory of its expert's rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokenyard.engine.agreement import Agreed
from tokenyard.topology import Placement
from tokenyard.types import Flow, Layout, Route


class PairCounts(NamedTuple):
    sent_RR: np.ndarray  # int64, tokens from rank i to rank j
    first_E: np.ndarray  # int64, this rank's first row on each expert's rank
    pair_rows_R: np.ndarray  # int64, the rows of pairs on each rank, padding included
    ends_L: list[int]  # of this rank's experts, the end of their rows with their padding
    counts_L: list[int]  # of this rank's experts, their rows without it
    moved_2R: np.ndarray  # int64, pairs that this rank sends to each, and gets from each
    liar: int  # the first rank that told what no rank tells, or -1


def tell(route: Route, layout: Layout, alignment: int) -> np.ndarray:
    """[R, R + E + 1] int64: the same row for every rank."""
    pairs = layout.num_tokens_per_expert.numpy()
    row = np.concatenate((route.send_counts, pairs, (alignment,)))
    return np.broadcast_to(row, (len(route.send_counts), len(row)))


def hear(
    agreed: Agreed, route: Route, placement: Placement, rank: int, one_node: bool
) -> tuple[Flow, PairCounts]:
    """Read what `tell` wrote on all ranks."""
    told_RM, tokens_R = agreed.payload, agreed.num_tokens
    num_ranks = len(tokens_R)
    sent_RR, pairs_RE = told_RM[:, :num_ranks], told_RM[:, num_ranks:-1]
    wrong_R = (told_RM < 0).any(1) | (told_RM[:, -1] < 1)
    alignment_R1 = np.maximum(told_RM[:, -1:], 1)
    flow = Flow.of(route, sent_RR[:, rank], tokens_R, sent_RR if one_node else None)
    experts_RL = placement.padded_experts_RL
    counts_RL = np.append(pairs_RE.sum(0), 0)[experts_RL]
    padded_RL = -(-counts_RL // alignment_R1) * alignment_R1
    ends_RL = padded_RL.cumsum(1)
    first_E = np.zeros(placement.num_experts + 1, np.int64)  # one more, for what is no expert
    first_E[experts_RL] = ends_RL - padded_RL
    first_E = first_E[:-1] + pairs_RE[:rank].sum(0)
    num_local = len(placement.experts_of_rank[rank])
    goes_RR = np.append(pairs_RE, np.zeros((num_ranks, 1), np.int64), 1)[:, experts_RL].sum(2)
    return flow, PairCounts(
        sent_RR=sent_RR,
        first_E=first_E,
        pair_rows_R=ends_RL[:, -1].copy(),
        ends_L=ends_RL[rank, :num_local].tolist(),
        counts_L=counts_RL[rank, :num_local].tolist(),
        moved_2R=np.stack((goes_RR[rank], goes_RR[:, rank])),
        liar=int(wrong_R.argmax()) if wrong_R.any() else -1,
    )
