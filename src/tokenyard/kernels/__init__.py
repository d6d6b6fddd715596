"""Kernel sets: one meaning, several implementations, loaded when asked for."""

from tokenyard.kernels.base import Kernels, RowKernels, available, choose, load, pick, wide_dtype
from tokenyard.kernels.in_use import InUse, describe

__all__ = [
    "InUse",
    "Kernels",
    "RowKernels",
    "available",
    "choose",
    "describe",
    "load",
    "pick",
    "wide_dtype",
]
