"""Refusals: tensors that the operators of `nn.functional` would fail on, or silently get wrong.

`backward()`, `torch.autograd.grad` and `is_grads_batched` work. The rest is refused:

- torch.vmap calls an operator once for each sample. Tickets do not live that long, and samples have
  different numbers of rows.
- torch.func's gradients need operators that do not register a backward of their own.
- Forward mode would see outputs that depend on no input.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

_REFUSED = {
    functorch.TransformType.Vmap: "torch.vmap: want a loop over the samples, or one call with all",
    functorch.TransformType.Grad: "torch.func.grad, vjp or jacrev: want torch.autograd.grad",
    functorch.TransformType.Jvp: "torch.func.jvp: want torch.autograd.grad",
}


def require_plain(what: str, **tensors: Tensor | None) -> None:
    """Raise inside a transform of torch.func, for tensors with tangents, and for meta tensors
    beside others.
    """
    if torch.compiler.is_compiling():
        return
    for transform in functorch.get_interpreter_stack() or ():
        if transform.key() in _REFUSED:
            raise NotImplementedError(f"{what} does not work inside {_REFUSED[transform.key()]}")
    given = {name: one for name, one in tensors.items() if one is not None}
    if forward_ad._current_level >= 0:
        for name, one in given.items():
            if one.is_floating_point() and forward_ad.unpack_dual(one).tangent is not None:
                raise NotImplementedError(
                    f"{what} has no forward mode, and {name} has a tangent: want "
                    "torch.autograd.grad"
                )
    (first, one), *rest = given.items()
    for name, other in rest:
        if other.is_meta != one.is_meta:
            raise ValueError(
                f"{what}: {first} is on {one.device} and {name} on {other.device}, "
                "want all on meta or none"
            )


def autocast_device(x: Tensor) -> str:
    """The device type for torch.autocast, which does not know meta. (Asking x.is_meta instead would
    make torch.compile compile a graph of that alone.)
    """
    kind = x.device.type
    return "cpu" if kind == "meta" else kind


def require_known_rows(what: str, x: Tensor, wanted: str) -> None:
    """Raise for a meta tensor where the number of rows depends on values: it has none."""
    if x.device.type == "meta":
        raise NotImplementedError(
            f"{what}: x is on meta, and how many rows come depends on values, want {wanted}"
        )
