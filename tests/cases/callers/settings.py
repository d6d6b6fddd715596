"""What has to be set outside of tokenyard before a caller of DeepEP runs on CPUs: all of it.

docs/guide/from_deepep.md shows the same lines, and a test compares the two.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Setting:
    line: str  # as a user writes it
    why: str
    apply: Callable[[], Any]


def _no_dynamo() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # for processes that a rank starts
    torch._dynamo.config.disable = True  # the variable is read once, and torch may have read it


def _cpu_is_the_device() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]


def _no_synchronize() -> None:
    torch.cuda.synchronize = lambda device=None: None


def _no_general_gemm() -> None:
    utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    utils.te_general_gemm = None


def _deepep_on_cpu() -> None:
    deepep: Any = importlib.import_module("torchtitan.distributed.deepep.deepep")
    torch.library.impl("deepep::dispatch", "CPU")(deepep._dispatch_op_impl)
    torch.library.impl("deepep::combine", "CPU")(deepep._combine_op_impl)


def _former_name() -> None:
    opaque: Any = importlib.import_module("torch._library.opaque_object")
    if not hasattr(opaque, "CustomClassBase"):
        opaque.CustomClassBase = opaque.OpaqueBase


def _hybridep_on_cpu() -> None:
    hybridep: Any = importlib.import_module("torchtitan.distributed.deepep.hybridep")
    for name in ("_dispatch_impl", "_combine_impl", "_dispatch_bwd_impl", "_combine_bwd_impl"):
        op = getattr(hybridep, name)
        op.register_kernel("cpu")(op._init_fn)


SETTINGS: dict[str, tuple[Setting, ...]] = {
    "megatron-core": (
        Setting(
            "TORCHDYNAMO_DISABLE=1",
            "parts of the layer are compiled on their first call, which takes longer than they do",
            _no_dynamo,
        ),
        Setting(
            'torch.cuda.current_device = lambda: "cpu"',
            "the router moves its weights to the current GPU",
            _cpu_is_the_device,
        ),
        Setting(
            "moe_utils.te_general_gemm = None",
            "without Transformer Engine the router asks for a name that was never defined",
            _no_general_gemm,
        ),
    ),
    "nemo-automodel": (
        Setting(
            "torch.cuda.synchronize = lambda device=None: None",
            "HybridEP's first dispatch waits for the GPU to report how long it took",
            _no_synchronize,
        ),
    ),
    "torchtitan-0.2.2": (
        Setting(
            'torch.library.impl("deepep::dispatch", "CPU")(deepep._dispatch_op_impl)',
            "the operators are registered for GPUs alone; the same line for `combine`",
            _deepep_on_cpu,
        ),
    ),
    "torchtitan-0.3.0": (
        Setting(
            'torch.library.impl("deepep::dispatch", "CPU")(deepep._dispatch_op_impl)',
            "the operators are registered for GPUs alone; the same line for `combine`",
            _deepep_on_cpu,
        ),
        Setting(
            "opaque_object.CustomClassBase = opaque_object.OpaqueBase",
            "`hybridep` is written for the torch after 2.13, where that class has another name",
            _former_name,
        ),
        Setting(
            'op.register_kernel("cpu")(op._init_fn)',
            "the same for the four operators of `hybridep`",
            _hybridep_on_cpu,
        ),
    ),
}


def set_up(group: Any, caller: str) -> None:
    """The first job of ranks that run a caller."""
    for setting in SETTINGS[caller]:
        setting.apply()
