"""Operators of torch.library that are called as plain functions where nobody looks at them.

A caller that traces, differentiates, transforms or profiles sees an operator. All other callers
would only pay for it: some 30 us a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)


class Operator:
    """A function of tensors and numbers, and the operator that stands for it."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.function = function
        self.operator = torch.library.custom_op(f"tokenyard::{name}", function, mutates_args=())
        self.register_fake = self.operator.register_fake
        self.register_autograd = self.operator.register_autograd

    def __call__(self, *args: Any) -> Any:
        if is_looked_at(args):
            return self.operator(*args)
        return self.function(*args)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    return lambda function: Operator(name, function)


def is_looked_at(args: tuple[Any, ...]) -> bool:
    """Whether a compiler, autograd, a mode, a transform, a profiler or a tensor subclass looks."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or functorch.peek_interpreter_stack() is not None
        or torch.autograd._profiler_enabled()
    ):
        return True
    graph = torch.is_grad_enabled()
    return any(
        type(one) not in _PLAIN
        or (graph and one.requires_grad)
        or one.is_meta
        or functorch.is_legacy_batchedtensor(one)
        for one in args
        if isinstance(one, Tensor)
    )
