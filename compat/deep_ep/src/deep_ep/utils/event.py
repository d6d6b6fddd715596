"""Where DeepEP 2 keeps its events."""

from tokenyard import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
