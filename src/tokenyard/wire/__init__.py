"""Byte layouts that kernels and transports must both know."""
