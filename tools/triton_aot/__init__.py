"""Triton kernels compiled ahead of time, without a device: for us, not for users."""
