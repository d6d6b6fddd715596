"""Where DeepEP 2 keeps `ElasticBuffer` and its handles."""

from tokenyard import ElasticBuffer, EPHandle, EventHandle, EventOverlap

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]
