"""`tokenyard.Buffer`: the core's, with all that code written for DeepEP V1 expects of it."""

from __future__ import annotations

from tokenyard import buffer
from tokenyard.compat import v1_fields
from tokenyard.compat.hardware import Hardware
from tokenyard.results import read_handles_as

read_handles_as(v1_fields)


class Buffer(Hardware, buffer.Buffer):
    __doc__ = buffer.Buffer.__doc__
