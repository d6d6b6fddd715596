"""The sum of combine, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard.kernels.base import NodeOfRank, Tensors, wide_dtype
from tokenyard.types import Route


def reduce(
    rows_ND: Tensor, route: Route, node_of_rank: NodeOfRank, biases_TD: Tensors, out_TD: Tensor
) -> Tensor:
    """
    >>> from tokenyard.kernels.reference.layout import route
    >>> rows = torch.tensor([[1.0], [10.0], [20.0]])  # one of rank 0, two of rank 1
    >>> both = route(torch.tensor([[True, True], [False, True]]))
    >>> reduce(rows, both, (0, 0), [torch.tensor([[0.5], [0.5]])], torch.empty(2, 1)).tolist()
    [[11.5], [20.5]]
    """
    dtype = out_TD.dtype
    total_TD = torch.zeros_like(out_TD, dtype=wide_dtype(dtype))
    for bias_TD in biases_TD:
        total_TD += bias_TD
    counts = list(route.send_counts)
    sent, came = route.send_token.split(counts), rows_ND.split(counts)
    num_nodes = max(node_of_rank) + 1
    for node in range(num_nodes):
        partial_TD = total_TD if num_nodes == 1 else torch.zeros_like(total_TD)
        for rank, rows in enumerate(came):
            if node_of_rank[rank] == node:
                # A token goes to a rank once, so the rows of one rank never meet in an element.
                partial_TD[sent[rank].long()] += rows.to(total_TD.dtype)
        if num_nodes > 1:
            total_TD += partial_TD.to(dtype)
    return out_TD.copy_(total_TD)
