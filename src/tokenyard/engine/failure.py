"""How a call that fails breaks a Buffer.

A rank that has begun a call on which others rely, and cannot end it, is out of step with them. Both
modes, the Buffer's thread and hooks report that to one `Failure`, which keeps the first error and
tells the peers, so that they need not wait. The Buffer closes itself when it is called next.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenyard.errors import CallMismatch, PeerError, PeerLeft


class Failure:
    def __init__(self, rank: int, tell: Callable[[PeerError], None]) -> None:
        """`tell` is the transport's: it tells the other ranks who is at fault."""
        self._rank, self._tell = rank, tell
        self.error: BaseException | None = None

    def give_up(self, error: BaseException) -> None:
        """This rank cannot end a call. Keep and tell the first error; later ones follow from it."""
        if self.error is not None:
            return
        self.error = error
        if isinstance(error, CallMismatch):  # the peers see it as this rank does
            return
        if not isinstance(error, PeerError):
            text = f"rank {self._rank} gave up: {_said(error)}"
            error = PeerLeft(text, ranks=(self._rank,), stage="")
        self._tell(error)

    @property
    def why_closed(self) -> str:
        assert self.error is not None
        what = str(self.error) if isinstance(self.error, PeerError) else _said(self.error)
        return f"the Buffer was broken by an earlier error ({what})"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def raised_on_all_ranks(error: BaseException) -> bool:
    """Whether every rank raises in this call, so that ranks are in step and the Buffer goes on."""
    return getattr(error, "on_all_ranks", False)
