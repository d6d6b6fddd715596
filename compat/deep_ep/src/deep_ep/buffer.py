"""Where DeepEP 1 keeps `Buffer`."""

from tokenyard import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
