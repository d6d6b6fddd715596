"""What a dispatch makes of the rows that arrive: local expert ids, and what follows the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tokenyard.engine.inputs import Checked
from tokenyard.kernels import Kernels
from tokenyard.runtime import memory
from tokenyard.topology import Placement
from tokenyard.types import Flow, Received


def received(
    given: Checked, flow: Flow, arrive: Sequence[Tensor | None], per_expert: np.ndarray
) -> tuple[Received, Tensor]:
    """What the user gets, once the columns have arrived: x, scales, ids, weights, tokens. And where
    the token of each row will be kept: not in the memory in which the rows lie.
    """
    x, scales, topk_idx, topk_weights, tokens = arrive
    assert x is not None
    assert tokens is not None
    each = given.expert_alignment
    counts = (-(-per_expert // each) * each).tolist()
    src_idx = memory.empty(flow.num_rows, dtype=tokens.dtype, device=tokens.device)
    return Received(x, scales, topk_idx, topk_weights, counts), src_idx


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
