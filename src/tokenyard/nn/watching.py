"""Gradients of experts between the backward pass and the optimiser's step.

Each rank has other experts. Whatever looks at one rank's gradients alone, or takes experts of
several ranks for copies of one, is refused where the optimiser steps.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from tokenyard.validate import require

if TYPE_CHECKING:
    from tokenyard.nn.share import Share

# By parameter of experts: whose it is; and the version of its gradient after the last backward
# pass, or after our own clipping. torch counts the changes of a tensor's values in it.
_shares = WeakTensorKeyDictionary()
_versions = WeakTensorKeyDictionary()
_hooks: list[Any] = []  # torch's, before every step: one for the process


def watch(parameter: Tensor, share: Share) -> None:
    """From now on refuse to step with gradients that were changed after the backward pass."""
    if share.buffer.group_size == 1:
        return
    _shares[parameter] = share
    if parameter.requires_grad and parameter not in _versions:
        _versions[parameter] = -1
        parameter.register_post_accumulate_grad_hook(note_version)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_step))


def of_process() -> set[Share]:
    """Those with parameters that are watched."""
    return set(_shares.values())


def note_version(parameter: Tensor) -> None:
    """The gradient is right as it is now."""
    if parameter in _versions and parameter.grad is not None:
        _versions[parameter] = parameter.grad._version


def is_changed(parameter: Tensor) -> bool:
    """By somebody else, since the backward pass; to zeros is no change."""
    noted, grad = _versions.get(parameter, -1), parameter.grad
    return grad is not None and noted not in (-1, grad._version) and bool(grad.any())


def _check_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """torch calls it before every step of every optimiser."""
    if torch.compiler.is_compiling():
        return
    given = [one for group in optimizer.param_groups for one in group["params"]]
    shares = [_shares[one] for one in given if one in _shares]
    if not shares:
        return
    if any(map(is_changed, given)):
        raise RuntimeError(
            "gradients of experts were changed since the backward pass. If "
            "torch.nn.utils.clip_grad_norm_ did that, it left out the experts of other ranks: want "
            "tokenyard.nn.clip_grad_norm_(model, max_norm). If it was meant, and the same on all "
            "ranks: want tokenyard.nn.accept_gradients(model)"
        )
    _refuse_scaler()
    known = vars(optimizer)
    if "torch.distributed.optim" not in sys.modules or known.get("_tokenyard") == len(given):
        return
    # ZeroRedundancyOptimizer has a process group. PostLocalSGDOptimizer, which torch does not hook,
    # has one in its averager, and the optimiser inside.
    around = [getattr(one, "__dict__", one) for one in gc.get_referrers(optimizer)]
    averagers = [one.get("averager") for one in around if isinstance(one, dict)]
    for one in (optimizer, *filter(None, averagers)):
        require(
            not any(share.mixes(getattr(one, "process_group", None)) for share in shares),
            f"{type(one).__name__} would make experts the same on all ranks: want it for other "
            "parameters, and another optimiser for expert_parameters(model)",
        )
    known["_tokenyard"] = len(given)


def _refuse_scaler() -> None:
    """Raise if a GradScaler that asks no other rank makes this step: it leaves no trace in the
    versions of gradients, but is among the callers. Subclasses may ask, as torch's of FSDP1 does.
    """
    frame = sys._getframe().f_back
    while frame := frame and frame.f_back:
        if frame.f_globals.get("__name__") == torch.amp.grad_scaler.__name__:
            scaler, plain = frame.f_locals["self"], torch.amp.GradScaler._unscale_grads_
            require(
                not scaler.is_enabled() or type(scaler)._unscale_grads_ is not plain,
                "torch.amp.GradScaler lets a rank whose experts overflow skip its step alone: want "
                "tokenyard.nn.GradScaler(model)",
            )
