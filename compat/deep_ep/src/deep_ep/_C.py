"""What DeepEP compiles and callers import from there."""

from tokenyard import Config, EventHandle, topk_idx_t

__all__ = ["Config", "EventHandle", "topk_idx_t"]
