"""The errors that users see, and how their messages are built.

Every message says what, got, wanted and where: `topk_idx[3, 1] is 64, want -1..63 (num_experts=64),
on rank 2`. Bad input raises a plain ValueError on the rank that gave it and a PeerInputError on all
others. That is a ValueError too, so `except ValueError` catches bad input on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

TEXT_WORDS = 64  # int64s that a message crosses ranks in: 504 bytes of UTF-8 and their length


class TokenyardError(RuntimeError):
    """Base of all errors that are not about the caller's input."""


class _Named(Exception):
    """An exception with keyword arguments that can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.__dict__), self.args


class PeerError(_Named, TokenyardError):
    """The exchange cannot go on because of other ranks. The Buffer is broken afterwards."""

    def __init__(self, message: str, *, ranks: tuple[int, ...], stage: str) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.stage = stage

    @property
    def rank(self) -> int:
        """The lowest rank at fault; -1 if nobody knows which."""
        return self.ranks[0] if self.ranks else -1


class PeerDied(PeerError):
    """A rank's process has ended."""


class PeerTimeout(PeerError):
    """A rank, which may still live, did not arrive within the time limit."""


class PeerLeft(PeerError):
    """A rank has closed its Buffer, or has given up a call that others are in."""


class OnAllRanks(ValueError):
    """Bad input that all ranks notice together, after the agreement. The Buffer stays usable."""

    on_all_ranks = True


class SharedMemoryError(TokenyardError):
    """There is not enough memory for rows. The message has the bytes that are needed and available,
    and what to do.
    """

    on_all_ranks = False  # True if all ranks raise one together; the Buffer stays usable then


def lack_of_memory(error: BaseException, stage: str, rank: int) -> SharedMemoryError | None:
    """An error that says that there is too little memory, also of Python, numpy or torch, as ours;
    None if it says something else.
    """
    if isinstance(error, SharedMemoryError):
        return error
    torchs = isinstance(error, RuntimeError) and re.search(
        "allocate memory|out of memory", str(error)
    )
    if isinstance(error, MemoryError) or torchs:
        return SharedMemoryError(f"{stage}: {error or 'out of memory'}, on rank {rank}")
    return None


class BufferClosed(TokenyardError):
    """The Buffer was closed, or broken by an earlier PeerError."""


class BufferInUse(TokenyardError):
    """Another thread is in a call of this Buffer, to which nothing happened; or the Buffer is that
    of another virtual rank.
    """


class PeerInputError(_Named, ValueError):
    """Another rank rejected its input, so no rank went on. The Buffer stays usable."""

    def __init__(self, message: str, *, rank: int, stage: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage

    on_all_ranks = True


def error_to_words(error: BaseException | None) -> np.ndarray:
    """The words of an error for other ranks, of which `rejected` makes theirs."""
    words = text_to_words("" if error is None else str(error))
    words[0] *= -1 if isinstance(error, SharedMemoryError) else 1
    return words


def rejected(
    rank: int, words: Sequence[int] | np.ndarray, stage: str
) -> PeerInputError | SharedMemoryError:
    """The error of the other ranks, made of what the rank with bad input has told, or the one
    without memory.
    """
    what = "rejected its input" if words[0] >= 0 else "could not get memory"
    text = f"rank {rank} {what}, so no rank went on: {words_to_text(words)}"
    if words[0] >= 0:
        return PeerInputError(text, rank=rank, stage=stage)
    error = SharedMemoryError(text)
    error.on_all_ranks = True
    return error


class CallMismatch(_Named, ValueError):
    """Ranks called different things, or the same thing with shapes that cannot meet.

    `what` names the first word of their calls that differs (see `agreement.Call`), if it is known.
    """

    on_all_ranks = True

    def __init__(self, message: str, *, what: str = "") -> None:
        super().__init__(message)
        self.what = what


def name_ranks(ranks: tuple[int, ...] | list[int]) -> str:
    """
    >>> name_ranks([2])
    'rank 2'
    >>> name_ranks([0, 3])
    'ranks 0, 3'
    """
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def text_to_words(text: str) -> np.ndarray:
    raw = text.encode(errors="backslashreplace")[: 8 * (TEXT_WORDS - 1)]
    words = np.zeros(TEXT_WORDS, np.int64)
    words[0] = len(raw)
    words[1:].view(np.uint8)[: len(raw)] = np.frombuffer(raw, np.uint8)
    return words


def words_to_text(words: Sequence[int] | np.ndarray) -> str:
    """
    >>> words_to_text(text_to_words("topk_idx[3, 1] is 64"))
    'topk_idx[3, 1] is 64'
    >>> words_to_text(text_to_words("a lone surrogate: \\ud83d"))
    'a lone surrogate: \\\\ud83d'
    """
    words = np.asarray(words)
    return words[1:].view(np.uint8)[: abs(int(words[0]))].tobytes().decode(errors="replace")
