"""What a dispatch makes of the rows that arrive: local expert ids, and what follows the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tokenyard.engine.inputs import Outgoing
from tokenyard.kernels import Kernels
from tokenyard.runtime import memory
from tokenyard.topology import Placement
from tokenyard.types import Flow, Received


def received(
    out: Outgoing, flow: Flow, arrive: Sequence[Tensor | None], per_expert: np.ndarray
) -> Received:
    """What the user gets, once the columns have arrived: x, scales, ids, weights, tokens."""
    x, scales, topk_idx, topk_weights, src_idx = arrive
    assert x is not None
    assert src_idx is not None
    if out.expert_alignment > 1:
        per_expert = -(-per_expert // out.expert_alignment) * out.expert_alignment
    return Received(
        x=x,
        scales=scales,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        # A copy: the handle keeps it, and must not keep the memory in which the rows lie.
        src_idx=memory.empty(flow.num_rows, dtype=src_idx.dtype, device=src_idx.device),
        num_tokens_per_expert=per_expert.tolist(),
    )


def receive(
    move: Callable[[], None],
    flow: Flow,
    arrive: Sequence[Tensor | None],
    kernels: Kernels,
    placement: Placement,
    rank: int,
    own_src_idx: Tensor,
) -> None:
    """Move the rows of a dispatch, and make of them what the user gets."""
    move()
    *_, topk_idx, topk_weights, src_idx = arrive
    assert src_idx is not None
    if flow.num_rows > flow.num_received:
        _zero_tail(flow, arrive)
        for column in (src_idx, topk_idx):
            if column is not None:
                column[flow.num_received :] = -1
    own_src_idx.copy_(src_idx[:, 0])
    if topk_idx is not None:
        kernels.localise(topk_idx, topk_weights, placement.local_table(rank))


def receive_again(move: Callable[[], None], flow: Flow, arrive: Sequence[Tensor | None]) -> None:
    """Move the rows of a cached dispatch."""
    move()
    if flow.num_rows > flow.num_received:
        _zero_tail(flow, arrive)


def _zero_tail(flow: Flow, columns: Sequence[Tensor | None]) -> None:
    """The rows that num_worst_tokens leaves after those that arrive."""
    for column in columns:
        if column is not None:
            column[flow.num_received :].view(torch.uint8).zero_()
