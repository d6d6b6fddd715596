"""tokenyard: expert parallelism for Mixture-of-Experts models, anywhere PyTorch runs.

    import tokenyard as deep_ep

Importing loads neither numba nor triton, reads no environment and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Aligned": "types",
    "Buffer": "compat.buffer",
    "BufferClosed": "errors",
    "BufferInUse": "errors",
    "CallMismatch": "errors",
    "Combined": "results",
    "Config": "types",
    "DispatchLayout": "results",
    "Dispatched": "results",
    "DispatchedByExpert": "results",
    "EPHandle": "compat.elastic",
    "ElasticBuffer": "compat.elastic",
    "EventHandle": "runtime.events",
    "EventOverlap": "runtime.events",
    "Gathered": "results",
    "Handle": "results",
    "HybridEPBuffer": "compat.hybrid_ep",
    "LowLatencyCombined": "low_latency.calls",
    "LowLatencyDispatched": "low_latency.calls",
    "LowLatencyHandle": "low_latency.handle",
    "Moves": "replicas",
    "PeerDied": "errors",
    "PeerError": "errors",
    "PeerInputError": "errors",
    "PeerLeft": "errors",
    "PeerTimeout": "errors",
    "Permuted": "types",
    "Prepared": "engine.loops",
    "PreparedRows": "engine.prepared",
    "Replicas": "replicas",
    "SharedMemoryError": "errors",
    "TokenyardError": "errors",
    "local_group": "groups",
    "merge_traces": "observe.tracing",
    "moe_align_block_size": "ops.align",
    "per_token_cast_back": "ops.quantize",
    "per_token_cast_to_fp8": "ops.quantize",
    "permute": "nn.functional",
    "rearrange": "ops.rearrange",
    "record": "observe.recording",
    "topk_idx_t": "types",
    "trace": "observe.tracing",
    "unpermute": "nn.functional",
    "warm_up": "tools.warming",
}

_MODULES = {
    "kernels": "kernels",
    "nn": "nn",
    "routing": "observe.routing",
    "testing": "testing",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604

if TYPE_CHECKING:
    from tokenyard import kernels as kernels
    from tokenyard import nn as nn
    from tokenyard import testing as testing
    from tokenyard.compat.buffer import Buffer as Buffer
    from tokenyard.compat.elastic import ElasticBuffer as ElasticBuffer
    from tokenyard.compat.elastic import EPHandle as EPHandle
    from tokenyard.compat.hybrid_ep import HybridEPBuffer as HybridEPBuffer
    from tokenyard.engine.loops import Prepared as Prepared
    from tokenyard.engine.prepared import PreparedRows as PreparedRows
    from tokenyard.errors import BufferClosed as BufferClosed
    from tokenyard.errors import BufferInUse as BufferInUse
    from tokenyard.errors import CallMismatch as CallMismatch
    from tokenyard.errors import PeerDied as PeerDied
    from tokenyard.errors import PeerError as PeerError
    from tokenyard.errors import PeerInputError as PeerInputError
    from tokenyard.errors import PeerLeft as PeerLeft
    from tokenyard.errors import PeerTimeout as PeerTimeout
    from tokenyard.errors import SharedMemoryError as SharedMemoryError
    from tokenyard.errors import TokenyardError as TokenyardError
    from tokenyard.groups import local_group as local_group
    from tokenyard.low_latency.calls import LowLatencyCombined as LowLatencyCombined
    from tokenyard.low_latency.calls import LowLatencyDispatched as LowLatencyDispatched
    from tokenyard.low_latency.handle import LowLatencyHandle as LowLatencyHandle
    from tokenyard.nn.functional import permute as permute
    from tokenyard.nn.functional import unpermute as unpermute
    from tokenyard.observe import routing as routing
    from tokenyard.observe.recording import record as record
    from tokenyard.observe.tracing import merge_traces as merge_traces
    from tokenyard.observe.tracing import trace as trace
    from tokenyard.ops.align import moe_align_block_size as moe_align_block_size
    from tokenyard.ops.quantize import per_token_cast_back as per_token_cast_back
    from tokenyard.ops.quantize import per_token_cast_to_fp8 as per_token_cast_to_fp8
    from tokenyard.ops.rearrange import rearrange as rearrange
    from tokenyard.replicas import Moves as Moves
    from tokenyard.replicas import Replicas as Replicas
    from tokenyard.results import Combined as Combined
    from tokenyard.results import Dispatched as Dispatched
    from tokenyard.results import DispatchedByExpert as DispatchedByExpert
    from tokenyard.results import DispatchLayout as DispatchLayout
    from tokenyard.results import Gathered as Gathered
    from tokenyard.results import Handle as Handle
    from tokenyard.runtime.events import EventHandle as EventHandle
    from tokenyard.runtime.events import EventOverlap as EventOverlap
    from tokenyard.tools.warming import warm_up as warm_up
    from tokenyard.types import Aligned as Aligned
    from tokenyard.types import Config as Config
    from tokenyard.types import Permuted as Permuted
    from tokenyard.types import topk_idx_t as topk_idx_t


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tokenyard.{_MODULES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tokenyard' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tokenyard.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
