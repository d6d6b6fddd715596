"""Where the branch hybrid-ep of DeepEP keeps `HybridEPBuffer`."""

from tokenyard.compat.hybrid_ep import HybridEPBuffer, indices_to_map

__all__ = ["HybridEPBuffer", "indices_to_map"]
