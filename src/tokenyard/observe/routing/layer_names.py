"""Which layer of a model makes a dispatch, and what it is called.

A Buffer does not know who calls it. So a recording looks at the stack: the innermost module of
torch is the layer, and the outermost is the model, which knows the layer's name.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

from torch import nn

_WRAPPERS = ("DistributedDataParallel", "DataParallel")  # they call the model "module"


class Caller(NamedTuple):
    layer: nn.Module | str | None  # None: nothing in the stack is a module
    model: nn.Module | None = None


def find_caller() -> Caller:
    """The modules that the calling function runs in."""
    inner: nn.Module | None = None
    outer: nn.Module | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                inner, outer = inner or owner, owner
        frame = frame.f_back
    return Caller(inner, outer)


def name_of(caller: Caller) -> str | None:
    """The name by which the model knows the layer, or that the layer has itself, as vLLM's do."""
    layer, model = caller
    if layer is None or isinstance(layer, str):
        return layer
    own = getattr(layer, "layer_name", None)
    if isinstance(own, str):
        return own
    if model is not None:
        for name, module in model.named_modules():
            if module is layer and name:
                return _without_wrappers(name, model)
    return type(layer).__name__


def _without_wrappers(name: str, model: nn.Module) -> str:
    """
    >>> _without_wrappers("_orig_mod.moe", nn.Module())
    'moe'
    """
    parts = [part for part in name.split(".") if part not in ("_orig_mod", "_fsdp_wrapped_module")]
    if type(model).__name__ in _WRAPPERS and parts[:1] == ["module"]:
        parts = parts[1:]
    return ".".join(parts)
