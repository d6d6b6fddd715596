"""What a planted fault is."""

from __future__ import annotations

from dataclasses import dataclass


class NoPlace(ValueError):
    """The file has not the text that a fault replaces, or has it more than once."""


@dataclass(frozen=True)
class Fault:
    """`old` occurs once in the file; with `new` in its place the library is wrong."""

    name: str
    area: str
    path: str  # under src/tokenyard
    old: str
    new: str
    first: str = ""  # tests that should find it, file.py or file.py::test: they run first
    reason: str = ""  # why no test can see it, if none can

    def plant(self, text: str) -> str:
        """The file's text with the fault. Raises NoPlace."""
        found = text.count(self.old)
        if found != 1:
            raise NoPlace(f"{self.name}: {self.path} has its text {found} times, want once")
        return text.replace(self.old, self.new)
