"""Kernel sets: one meaning, several implementations, loaded when asked for."""

from tokenyard.kernels.base import Kernels, available, choose, load, pick

__all__ = ["Kernels", "available", "choose", "load", "pick"]
