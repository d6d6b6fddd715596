"""Whether tensors are like earlier ones that were checked: one look where checks take twenty.

torch compares type, dtype, device, sizes, strides, requires_grad and the kinds of dispatch that a
negative view, a wrapper or a tensor of inference mode differ in, as it does for compiled graphs. A
torch that has no such guards checks every tensor anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

Like = Callable[..., bool]


def like_none(*_: Any) -> bool:
    """No tensors are like those that nobody has seen."""
    return False


def like(*tensors: Tensor) -> Like:
    """A function that says of as many other values whether they are tensors like these."""
    if TensorGuards is None:
        return like_none
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
