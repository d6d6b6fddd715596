"""Where DeepEP 2 keeps `ElasticBuffer` and its handles."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]  # noqa: F822

_HOMES = {
    "EPHandle": "tokenyard.elastic",
    "ElasticBuffer": "tokenyard.elastic",
    "EventHandle": "tokenyard",
    "EventOverlap": "tokenyard",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} (tokenyard's) has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        raise AttributeError(f"this version of tokenyard has no {name} yet") from error
