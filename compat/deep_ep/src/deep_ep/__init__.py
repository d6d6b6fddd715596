"""DeepEP's names for what tokenyard defines: V1's shape, and V2's.

The modules of this package only name things; `__version__` tells this `deep_ep` from DeepEP's own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import tokenyard
from tokenyard import Buffer, Config, EventHandle, EventOverlap, topk_idx_t

if TYPE_CHECKING:
    from deep_ep.buffers.elastic import ElasticBuffer, EPHandle
    from deep_ep.hybrid_ep_buffer import HybridEPBuffer
    from deep_ep.utils.envs import get_logical_domain_size, get_physical_domain_size

# The release of DeepEP whose interface this is, and whose code it is.
__version__ = f"2.1.0+tokenyard.{tokenyard.__version__}"

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
]

# Loaded when somebody asks for them: programs for V1 need none of them.
_HOMES = {
    "EPHandle": "buffers.elastic",
    "ElasticBuffer": "buffers.elastic",
    "HybridEPBuffer": "hybrid_ep_buffer",
    "get_logical_domain_size": "utils.envs",
    "get_physical_domain_size": "utils.envs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'deep_ep' (tokenyard's) has no attribute {name!r}")
    value = getattr(importlib.import_module(f"deep_ep.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
