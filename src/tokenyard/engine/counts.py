"""How much arrives from whom: the counts that ranks tell each other before rows move.

A rank sends each other rank one row of integers: how many rows that rank gets, how many (token, k)
pairs each of its experts gets, and, where all ranks share a node, how many rows every rank gets.
"""

from __future__ import annotations

import numpy as np
import torch

from tokenyard import validate
from tokenyard.engine.agreement import Agreed, Counting
from tokenyard.engine.inputs import Checked
from tokenyard.topology import Placement
from tokenyard.types import DeviceCounts, Flow, Layout, Route


def tell(route: Route, layout: Layout, placement: Placement, one_node: bool) -> np.ndarray:
    """[R, M] int64: row r for rank r.

    Rank 0 has one expert and gets 1 row; rank 1 has two experts and gets 2 rows, with 2 and 1
    pairs:

    >>> import torch
    >>> layout = Layout(num_tokens_per_rank=torch.tensor([1, 2]), num_tokens_per_node=None,
    ...     num_tokens_per_expert=torch.tensor([1, 2, 1]), is_token_in_rank=torch.tensor([]))
    >>> route = Route(send_token=torch.tensor([0, 0, 1]), send_counts=(1, 2),
    ...     copy_start=torch.tensor([]), copy_rank=torch.tensor([]), copy_slot=torch.tensor([]))
    >>> tell(route, layout, Placement(torch.tensor([0, 1, 1]), 2), one_node=True).tolist()
    [[1, 1, 0, 1, 2], [2, 2, 1, 1, 2]]
    """
    counts, num_ranks = route.send_counts, placement.num_ranks
    last = 1 + placement.most_experts
    told_RM = np.empty((num_ranks, last + num_ranks * one_node), np.int64)
    told_RM[:, 0] = counts
    pairs = layout.num_tokens_per_expert.cpu().numpy()
    if placement.is_even:
        told_RM[:, 1:last] = pairs.reshape(num_ranks, -1)
    else:  # ranks with fewer experts than others are padded with an expert that nobody chose
        told_RM[:, 1:last] = np.append(pairs, 0)[placement.padded_experts_RL]
    if one_node:
        told_RM[:, last:] = counts
    return told_RM


def tell_from_device(given: Checked, counted: DeviceCounts, one_node: bool) -> Counting:
    """Do what `tell` does where the host has not read the counts. It need not read them here."""
    placement, topk_idx = given.placement, given.topk_idx
    num_ranks = placement.num_ranks
    counts = counted.numbers[1 : 1 + num_ranks]
    pairs = torch.nn.functional.pad(counted.numbers[1 + num_ranks :], (0, 1))
    told = [counts[:, None], pairs[placement.padded_experts]]
    if one_node:
        told.append(counts.expand(num_ranks, num_ranks))

    def find_bad(numbers: np.ndarray) -> Exception | None:
        if numbers[0] < 0:
            return None
        assert topk_idx is not None, "the device has counted it"
        return validate.bad_expert(topk_idx, int(numbers[0]), placement.num_experts)

    return Counting(torch.cat(told, 1), counted.numbers, find_bad)


def hear(agreed: Agreed, route: Route, placement: Placement, rank: int) -> tuple[Flow, np.ndarray]:
    """Read what `tell` wrote on the other ranks: the flow, and the pairs of this rank's experts."""
    told_RM, tokens_R, worst = agreed.payload, agreed.num_tokens, agreed.num_worst_tokens
    last = 1 + placement.most_experts
    sent_RR = told_RM[:, last:] if told_RM.shape[1] > last else None
    flow = Flow.of(route, told_RM[:, 0], tokens_R, sent_RR)
    if any(worst):
        rows_R = None
        if flow.rows_R is not None:
            rows_R = np.where(np.array(worst) > 0, worst, flow.rows_R)
        most_rows = max(flow.most_rows, *worst)
        num_rows = worst[rank] or flow.num_rows
        flow = flow._replace(num_rows=num_rows, rows_R=rows_R, most_rows=most_rows)
    return flow, told_RM[:, 1 : 1 + len(placement.experts_of_rank[rank])].sum(0)
