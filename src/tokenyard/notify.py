"""How much arrives from whom: the counts that ranks tell each other before rows move.

To each rank goes one row of integers: how many rows it will get, how many (token, k) pairs each of
its experts, and, where all ranks share a node, what V1's handle shows besides: the rows for it in
each channel, and the rows for every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tokenyard.topology import Placement
from tokenyard.types import Counts, Layout, Route


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """What one rank learns from the others."""

    rows: tuple[int, ...]  # R
    per_expert: np.ndarray  # [L], from all ranks
    counts: Counts | None  # for V1's handle; None on several nodes


def tell(
    route: Route, layout: Layout, placement: Placement, channel_prefix_RC: Tensor | None
) -> np.ndarray:
    """[R, M] int64: row r for rank r. The channel prefix is given on one node only.

    Rank 0 has one expert and gets 1 row; rank 1 has two experts and gets 2 rows, with 2 and 1
    pairs:

    >>> import torch
    >>> layout = Layout(num_tokens_per_rank=torch.tensor([1, 2]), num_tokens_per_node=None,
    ...     num_tokens_per_expert=torch.tensor([1, 2, 1]), is_token_in_rank=torch.tensor([]))
    >>> route = Route(send_token=torch.tensor([0, 0, 1]), send_counts=(1, 2),
    ...     copy_start=torch.tensor([]), copy_rank=torch.tensor([]), copy_slot=torch.tensor([]))
    >>> tell(route, layout, Placement(torch.tensor([0, 1, 1]), 2), None).tolist()
    [[1, 1, 0], [2, 2, 1]]
    """
    counts = np.array(route.send_counts, np.int64)[:, None]
    # Ranks with fewer experts than others are padded with an expert that nobody chose.
    pairs = np.append(layout.num_tokens_per_expert.numpy(), 0)[placement.padded_experts_RL]
    parts = [counts, pairs]
    if channel_prefix_RC is not None:
        parts += [channel_prefix_RC.numpy(), np.broadcast_to(counts.T, (len(counts), len(counts)))]
    return np.concatenate(parts, axis=1, dtype=np.int64)


def hear(
    told_RM: np.ndarray, placement: Placement, num_local: int, num_channels: int | None
) -> Incoming:
    """Read what `tell` wrote on the other ranks. num_channels is None on several nodes."""
    counts = None
    if num_channels is not None:
        after = 1 + placement.padded_experts_RL.shape[1]
        counts = Counts(
            in_channels_RC=told_RM[:, after : after + num_channels],
            sent_RR=told_RM[:, after + num_channels :],
        )
    return Incoming(
        rows=tuple(told_RM[:, 0].tolist()),
        per_expert=told_RM[:, 1 : 1 + num_local].sum(0),
        counts=counts,
    )
