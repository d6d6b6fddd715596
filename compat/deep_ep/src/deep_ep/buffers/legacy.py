"""Where DeepEP 2 keeps V1's `Buffer`."""

from tokenyard import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
