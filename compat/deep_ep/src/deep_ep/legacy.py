"""One of the places where Automodel looks for V1's `Buffer`."""

from tokenyard import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
