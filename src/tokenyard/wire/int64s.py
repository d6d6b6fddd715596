"""Memory of whole numbers for Python and compiled code alike: Python sees int64, code an address.

`shm.guard` replaces both functions, so call them through the module, as `int64s.new`.
"""

from __future__ import annotations

from array import array

_ZERO = array("q", [0])


def new(count: int) -> array[int]:
    """An array of `count` zeros."""
    return _ZERO * count


def address(numbers: array[int]) -> int:
    """Good for as long as the numbers live."""
    return numbers.buffer_info()[0]
