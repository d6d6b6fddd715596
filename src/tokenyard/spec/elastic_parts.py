"""The small parts of DeepEP V2, of all ranks at once: a table to fetch from, tensors between
neighbours, and all-gathers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def engram_fetch(storages: Sequence[Tensor], indices_TK: Tensor) -> Tensor:
    """[T, K * D]: each token's entries side by side. Entry i is row i % n of rank i // n.

    >>> storages = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]
    >>> engram_fetch(storages, torch.tensor([[3, 0], [2, 2]])).tolist()
    [[4.0, 1.0], [3.0, 3.0]]
    """
    num_each, hidden = storages[0].shape
    fetched = torch.zeros(len(indices_TK), indices_TK.shape[1] * hidden, dtype=storages[0].dtype)
    for token, wanted in enumerate(indices_TK.tolist()):
        for k, entry in enumerate(wanted):
            row = storages[entry // num_each][entry % num_each]
            fetched[token, k * hidden : (k + 1) * hidden] = row
    return fetched


def pp_received(sent: Sequence[tuple[int, int, Tensor]], source: int, to: int) -> list[Tensor]:
    """What rank `to` receives from a neighbour, of all (source, to, tensor) in the order of time.

    >>> sent = [(0, 1, torch.tensor(5)), (1, 0, torch.tensor(6)), (0, 1, torch.tensor(7))]
    >>> [t.item() for t in pp_received(sent, 0, 1)]
    [5, 7]
    """
    return [t for a, b, t in sent if (a, b) == (source, to)]


def agrs_gathered(tensors: Sequence[Tensor]) -> Tensor:
    """[R, ...]: the tensors of all ranks, by rank; the same on every rank.

    >>> agrs_gathered([torch.tensor([1, 2]), torch.tensor([3, 4])]).tolist()
    [[1, 2], [3, 4]]
    """
    return torch.stack(list(tensors))
