"""Where the branch hybrid-ep of DeepEP keeps `HybridEPBuffer`."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["HybridEPBuffer", "indices_to_map"]  # noqa: F822

_HOME = "tokenyard.hybrid_ep"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} (tokenyard's) has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME), name)
    except ModuleNotFoundError as error:
        raise AttributeError(f"this version of tokenyard has no {name} yet") from error
