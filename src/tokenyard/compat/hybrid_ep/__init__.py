"""HybridEP's shape: the class of DeepEP's branch hybrid-ep, over a Buffer's rows by expert.

Megatron-LM and torchtitan call it for rows that arrive grouped by expert. Routing is a map [T, E],
not a list [T, K]. Gradients are the caller's: its backward pass calls the other method.
"""

from tokenyard.compat.hybrid_ep.buffer import HybridEPBuffer
from tokenyard.compat.hybrid_ep.routing import HybridHandle, indices_to_map

__all__ = ["HybridEPBuffer", "HybridHandle", "indices_to_map"]
