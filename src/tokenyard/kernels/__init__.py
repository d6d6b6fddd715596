"""Kernel sets: one meaning, several implementations, loaded when asked for."""

from tokenyard.kernels.base import Kernels, RowKernels, available, choose, load, pick, wide_dtype

__all__ = ["Kernels", "RowKernels", "available", "choose", "load", "pick", "wide_dtype"]
