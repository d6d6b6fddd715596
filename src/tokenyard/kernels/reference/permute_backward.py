"""The gradients of unpermute, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokenyard.kernels.reference.permute import find_outside
from tokenyard.types import UnpermuteGrads


def unpermute_backward(
    grad_ND: Tensor, y_MD: Tensor, row_of_NK: Tensor, weights_NK: Tensor, out: UnpermuteGrads
) -> int:
    """
    >>> grad, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.5, 7.0]])
    >>> out = UnpermuteGrads(torch.empty(2, 2), torch.empty(1, 2))
    >>> row_of, weights = torch.tensor([[1, -1]]), torch.tensor([[10.0, 5.0]])
    >>> unpermute_backward(grad, y, row_of, weights, out)
    -1
    >>> out.y.tolist(), out.weights.tolist()
    ([[0.0, 0.0], [10.0, 20.0]], [[14.5, 0.0]])
    """
    first_bad = find_outside(row_of_NK, y_MD.shape[0])
    if first_bad >= 0:
        return first_bad
    row, k = (row_of_NK >= 0).nonzero(as_tuple=True)
    place = row_of_NK[row, k]
    grad = grad_ND[row].to(weights_NK.dtype)
    out.y.zero_()
    out.y[place] = (weights_NK[row, k, None] * grad).to(out.y.dtype)
    out.weights.zero_()
    out.weights[row, k] = _dots(grad, y_MD[place].to(grad.dtype))
    return -1


def _dots(one_ND: Tensor, other_ND: Tensor) -> Tensor:
    """[N]: 16 sums a row, element d goes to sum d % 16; then these by halves."""
    products = pad(one_ND * other_ND, (0, -one_ND.shape[1] % 16))
    sums = torch.zeros_like(products[:, :16])
    for part in products.split(16, dim=1):
        sums += part
    while sums.shape[1] > 1:
        low, high = sums.chunk(2, dim=1)
        sums = low + high
    return sums[:, 0]
