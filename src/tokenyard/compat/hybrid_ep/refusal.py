"""Memory that one rank lacks outside of its Buffer's calls, of which the others hear."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar, cast

from tokenyard.errors import BufferClosed, TokenyardError

F = TypeVar("F", bound=Callable[..., Any])


def heard_by_all(call: F) -> F:
    """A call in which what raises between calls of the Buffer raises on other ranks too: in theirs,
    or in their next.
    """

    @wraps(call)
    def heard(self: Any, **given: Any) -> Any:
        try:
            return call(self, **given)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, TokenyardError):  # which is the Buffer's
                with suppress(BufferClosed):
                    self._buffer.refuse(error)
            raise

    return cast(F, heard)
