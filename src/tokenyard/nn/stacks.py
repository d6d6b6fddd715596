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
        self._module, self._mark = weakref.ref(module), share.mark
        self._by_name = {name: (stack.node, _where(stack.own)) for name, stack in by_name.items()}
        self.place = -next(_numbers)  # what stands for them in a dispatch; marks are not below 0
        self._balance = share.buffer._open_engine().balance
        known = share.buffer.get_node_experts(share.num_experts)
        # How many experts rows may be for, where nobody trains them; 0 for those of this rank.
        self.num_balanced = 0 if self._balance is None else len(known)
        _known[self.place] = self
        share.buffer._users.add(self)

    def forget(self) -> None:
        """The Buffer closes: of the stacks only this rank's parts stay, as parameters."""
        self._by_name, self._balance = {}, None

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None

    def of_node(self, name: str, weights: Tensor) -> Tensor | None:
        """[E, ...] of all ranks of the node, unless this rank's weights are elsewhere by now. (Code
        that torch.compile has made relies on `check`.)
        """
        node, where = self._by_name.get(name, (None, None))
        if node is None or torch.compiler.is_compiling():
            return node
        if self._balance is not None:
            self._balance.read(weights.element_size() * node.shape[1:].numel())
        return node if _where(weights) == where else None

    def check(self, buffer: Buffer, num_experts: int) -> None:
        """All ranks raise if experts live elsewhere by now, or, where a balance lets ranks compute
        with each other's, if they lie in other memory.
        """
        parameters = getattr(self._module(), "_parameters", {})
        for name, (_, where) in self._by_name.items() if self.num_balanced else ():
            if name not in parameters or _where(parameters[name]) != where:  # of an adapter: none
                what = f"{type(self._module()).__name__}.{name} of rank {buffer.rank}"
                buffer.refuse(ValueError(f"{what} {_LEFT}"))
        buffer.require_placement(num_experts, self._mark)


def _where(weights: Tensor) -> tuple[object, ...]:
    return weights.data_ptr(), weights.dtype, weights.shape, weights.stride()


_LEFT = (
    "is not in the memory that ranks share: it was loaded with assign=True, made anew by to() or "
    "to_empty(), or has an adapter; want tokenyard.nn.share_experts(model) after that, on all ranks"
)
_UNREAD = "other ranks cannot read: want the adapter merged, or a Buffer without balance"


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
    held = [(part, share) for _, part, share in shares(module)]
    require(len(held) > 0, "the module holds no experts of a Buffer, want one that has an nn.MoE")
    try:
        _check(module)
    except ValueError as error:
        held[0][1].buffer.refuse(error)
    done: dict[nn.Parameter, Stack] = {}  # layers may share one
    for part, share in held:
        own = dict(part.named_parameters(recurse=False))
        for parameter in own.values():
            if parameter not in done:
                done[parameter] = share.buffer.share_stack(parameter.data)
                parameter.data = done[parameter].own
        share.stacks = Stacks(part, share, {name: done[one] for name, one in own.items()})


def _check(module: nn.Module) -> None:
    """Raise ValueError if experts of the module cannot be shared."""
    for name, part, share in shares(module):
        if share.buffer.balance is not None:
            refuse_adapters(module, _UNREAD)
        require(not hasattr(part, "parametrizations"), f"{name} is parametrised, want it plain")
        for key, parameter in part.named_parameters(prefix=name, recurse=False):
            require(not is_dtensor(parameter), was_sharded(key))
            require(parameter.is_cpu, f"{key} is on {parameter.device}, want cpu")


def wants_stacks(buffer: Buffer, share_experts: bool | None) -> bool:
    """Whether a model's experts are to be shared, by what its maker was asked."""
    has_balance = buffer.balance is not None
    if has_balance and share_experts is False:
        wrong = "share_experts is False, and the Buffer has a balance, with which ranks compute for"
        buffer.refuse(ValueError(f"{wrong} each other: want True or None, on rank {buffer.rank}"))
    return has_balance if share_experts is None else share_experts
