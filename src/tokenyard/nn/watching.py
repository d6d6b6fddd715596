"""Gradients of experts between the backward pass and the optimiser's step.

Each rank has other experts. Whatever looks at one rank's gradients alone, or takes experts of
several ranks for copies of one, is refused where the optimiser steps.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from tokenyard.validate import require

if TYPE_CHECKING:
    from tokenyard.nn.share import Share


@dataclass(slots=True)
class _Watched:
    share: weakref.ref[Share]  # an optimiser keeps parameters, and must not keep their Buffer
    # Of the gradient, after the last backward pass or our own change: torch counts in it how often
    # a tensor's values were changed. -1 before that, None where no hook notes it.
    version: int | None = None


_watched = WeakTensorKeyDictionary()  # by parameter of experts
_hooks: list[Any] = []  # torch's, before every step: one for the process


def watch(parameter: Tensor, share: Share) -> None:
    """From now on refuse to step with gradients that were changed after the backward pass."""
    known = _watched.get(parameter)
    if known is None:
        if share.buffer.group_size == 1:
            return
        known = _watched[parameter] = _Watched(weakref.ref(share))
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_check_step))
    elif known.share() is None:  # of a module that has died
        known.share = weakref.ref(share)
    if known.version is None and parameter.requires_grad:
        known.version = -1
        parameter.register_post_accumulate_grad_hook(note_version)


def watched_shares(parameters: Iterable[Tensor] | None = None) -> set[Share]:
    """The living Shares of those parameters that are watched; of all in this process if None."""
    given = _watched.values() if parameters is None else map(_watched.get, parameters)
    found = {one.share() for one in given if one is not None}
    return {one for one in found if one is not None}


def note_version(parameter: Tensor) -> None:
    """Let the gradient count as right, as it is now."""
    known = _watched.get(parameter)
    if known is not None and known.version is not None and parameter.grad is not None:
        known.version = parameter.grad._version


def is_changed(parameter: Tensor) -> bool:
    """Whether somebody else has changed the gradient since the backward pass, but not to zeros."""
    known, grad = _watched.get(parameter), parameter.grad
    if known is None or grad is None or known.version in (None, -1, grad._version):
        return False
    return bool(grad.any())


def _check_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """torch calls it before every step of every optimiser."""
    if torch.compiler.is_compiling():
        return
    given = [one for group in optimizer.param_groups for one in group["params"]]
    if not any(one in _watched for one in given):
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
    # ZeroRedundancyOptimizer has a process group. PostLocalSGDOptimizer has one in its averager;
    # torch calls no hook of it, but of the optimiser inside, whose groups it shares.
    around = [getattr(one, "__dict__", one) for one in gc.get_referrers(optimizer.param_groups)]
    averagers = [
        one.get("averager")
        for one in around
        if isinstance(one, dict) and one.get("param_groups") is optimizer.param_groups
    ]
    shares = watched_shares(given)
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
