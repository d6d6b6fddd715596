"""Events, and where DeepEP's test helpers are found.

DeepEP 1 has `EventOverlap` here, DeepEP 2 `EventHandle`; callers of both are served. Where the
environment variable DEEP_EP_SOURCE names a checkout of DeepEP, its own math.py, gate.py and refs.py
are found there, behind the modules of this folder.
"""

import os

from tokenyard import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]


def _helpers_of_a_checkout() -> list[str]:
    checkout = os.environ.get("DEEP_EP_SOURCE")
    if not checkout:
        return []
    folder = os.path.join(checkout, "deep_ep", "utils")
    if not os.path.isdir(folder):
        raise ImportError(f"DEEP_EP_SOURCE is {checkout!r}, want a checkout of DeepEP: no {folder}")
    return [folder]


__path__ += _helpers_of_a_checkout()
