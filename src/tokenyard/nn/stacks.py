"""Experts in memory that the ranks of a node share, so that each can compute with those of all.

A parameter becomes a view of its rank's part of a `Stack`. What gives it other memory afterwards is
found out before the next dispatch, on whichever rank it happens, so that no rank computes with what
the weights once were.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tokenyard.buffer import Buffer
from tokenyard.nn.share import Share, is_dtensor, refuse_adapters, shares, was_sharded
from tokenyard.validate import require

if TYPE_CHECKING:
    from tokenyard.shm.stack import Stack

_numbers = itertools.count(1)
_known: weakref.WeakValueDictionary[int, Stacks] = weakref.WeakValueDictionary()  # by place


class Stacks:
    """The stacks of one module, by the names of its parameters. A copy of the module has none."""

    def __init__(self, module: nn.Module, share: Share, by_name: dict[str, Stack]) -> None:
        self._module, self._mark, self._by_name = weakref.ref(module), share.mark, by_name
        self.place = -next(_numbers)  # what stands for them in a dispatch; marks are not below 0
        balance, known = share.buffer.balance, share.buffer.get_node_experts(share.num_experts)
        # How many experts rows may be for, where nobody trains them; 0 for those of this rank.
        self.num_balanced = 0 if balance is None else len(known)
        _known[self.place] = self

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None

    def of_node(self, name: str, weights: Tensor) -> Tensor | None:
        """[E, ...] of all ranks of the node, unless this rank's weights are elsewhere by now. (Code
        that torch.compile has made relies on `check`.)
        """
        stack = self._by_name.get(name)
        if stack is None or not (torch.compiler.is_compiling() or _lies_in(weights, stack.own)):
            return None
        return stack.node

    def check(self, buffer: Buffer, num_experts: int) -> None:
        """All ranks raise if experts live elsewhere by now, or, where a balance lets ranks compute
        with each other's, if they lie in other memory.
        """
        parameters = getattr(self._module(), "_parameters", {})
        for name, stack in self._by_name.items() if self.num_balanced else ():
            if not _lies_in(parameters.get(name), stack.own):
                what = f"{type(self._module()).__name__}.{name} of rank {buffer.rank}"
                buffer.refuse(ValueError(f"{what} {_LEFT}"))
        buffer.require_placement(num_experts, self._mark)


def _lies_in(weights: Tensor | None, own: Tensor) -> bool:
    if weights is None:  # an adapter computes them
        return False
    return weights.data_ptr() == own.data_ptr() and weights.dtype is own.dtype


_LEFT = (
    "is not in the memory that ranks share: it was loaded with assign=True, made anew by to() or "
    "to_empty(), or has an adapter; want tokenyard.nn.share_experts(model) after that, on all ranks"
)


def require_place(buffer: Buffer, num_experts: int, place: int) -> None:
    """All ranks raise if experts are no more where they were when a Share gave this `place`."""
    stacks = _known.get(place)
    if stacks is None:
        buffer.require_placement(num_experts, place)
    else:
        stacks.check(buffer, num_experts)


@torch.inference_mode(False)  # what is made in that mode cannot be trained
@torch.no_grad()
def share_experts(module: nn.Module) -> None:
    """Put the experts of all layers in the module where the ranks of a node read each other's, as a
    Buffer with a balance needs it. Parameters stay the objects that they were; no copy stays.

    `nn.MoE` and `expert_parallel` do so by themselves. Call it, on all ranks, after what gives
    parameters other memory: `load_state_dict(assign=True)`, `to(dtype)`, `to_empty`, a deepcopy. An
    optimiser's steps and `load_state_dict` write where the experts lie.

    Raises on all ranks if something cannot be shared, or if there is no memory.
    """
    held = list(shares(module))
    require(len(held) > 0, "the module holds no experts of a Buffer, want one that has an nn.MoE")
    done: dict[nn.Parameter, Stack] = {}  # layers may share one
    for name, part, share in held:
        try:
            _check(name, module, part, share)
        except ValueError as error:
            share.buffer.refuse(error)
        found = {}
        for key, parameter in part.named_parameters(recurse=False):
            if parameter not in done:
                done[parameter] = share.buffer.share_stack(parameter.data)
                parameter.data = done[parameter].own
            found[key] = done[parameter]
        share.stacks = Stacks(part, share, found)


def _check(name: str, module: nn.Module, part: nn.Module, share: Share) -> None:
    """Raise ValueError if the experts of a part of the module cannot be shared."""
    if share.buffer.balance is not None:
        refuse_adapters(module)
    require(not hasattr(part, "parametrizations"), f"{name} is parametrised, want it plain")
    for key, parameter in part.named_parameters(recurse=False):
        if is_dtensor(parameter):
            raise ValueError(was_sharded(f"{name}.{key}"))
        require(parameter.is_cpu, f"{name}.{key} is on {parameter.device}, want cpu")


def wants_stacks(buffer: Buffer, share_experts: bool | None) -> bool:
    """Whether a model's experts are to be shared, by what its maker was asked."""
    has_balance = buffer.balance is not None
    if share_experts is False and has_balance:
        buffer.refuse(
            ValueError(
                "share_experts is False, and the Buffer has a balance, with which ranks compute "
                f"for each other: want True or None, on rank {buffer.rank}"
            )
        )
    return has_balance if share_experts is None else share_experts
