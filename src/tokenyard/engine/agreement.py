"""All ranks go on together, or all raise: the second step of every call that exchanges rows.

Each rank tells every other rank what it is about to do (a Call: stage, number, shapes), whether its
own input was good, and its counts. Bad input on one rank, or calls that differ, raise on *all*
ranks before any row moves, and the group goes on working. Messages are integers of a fixed size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from tokenyard.engine.mismatch import STAGES, differ
from tokenyard.errors import (
    TEXT_WORDS,
    SharedMemoryError,
    error_to_words,
    lack_of_memory,
    rejected,
)
from tokenyard.runtime.streams import to_device
from tokenyard.runtime.waits import Waits
from tokenyard.transports import Offer, Transport
from tokenyard.types import ROW_DTYPES, SCALE_DTYPES, Config
from tokenyard.wire import message as at


class Call(NamedTuple):
    """What must be the same on every rank. -1 where a stage has no such thing."""

    stage: int
    buffer: int = -1  # which Buffer of the group
    number: int = -1  # of the calls on this Buffer; a rank that skipped one is found out
    handle: int = -1  # the number of the dispatch whose handle is used
    hidden: int = -1
    dtype: int = -1
    num_scales: int = -1  # of a row
    scales_dtype: int = -1
    num_topk: int = -1
    num_experts: int = -1
    num_channels: int = -1
    num_slots: int = -1  # of a ring, at most
    num_max: int = -1
    cast: int = -1
    options: int = -1  # a digest of what was given to the Buffer
    tag: int = -1  # the caller's

    @staticmethod
    def of_rows(stage: str, x: Tensor, scales: Tensor | None, config: Config, **more: int) -> Call:
        """A call that moves these rows."""
        if scales is not None:
            more["num_scales"] = scales.shape[1]
            more["scales_dtype"] = SCALE_DTYPES.index(scales.dtype)
        return Call.of_shape(stage, x.dtype, x.shape[1], config, **more)

    @staticmethod
    def of_shape(stage: str, dtype: torch.dtype, hidden: int, config: Config, **more: int) -> Call:
        """A call that moves rows of this shape. Rings are divided by two numbers of the Config."""
        return Call(
            stage=STAGES.index(stage),
            hidden=hidden,
            dtype=ROW_DTYPES.index(dtype),
            num_channels=config.num_channels,
            num_slots=config.num_max_nvl_chunked_recv_tokens,
            **more,
        )


_BUFFER = at.CALL + Call._fields.index("buffer")
assert len(Call._fields) == at.CALL_WORDS
assert at.CALL + Call._fields.index("number") == at.NUMBER
assert at.CALL + Call._fields.index("handle") == at.HANDLE


class Counting(NamedTuple):
    """Counts of a rank that lie on a device. The host reads them with the answer of the others."""

    payload: Tensor  # [R, M] int64, as that of Terms; M is at most PAYLOAD_WORDS
    numbers: Tensor  # int64, which the host needs; the first is below 0 unless the input is bad
    find: Callable[[np.ndarray], Exception | None]  # what is wrong, by these numbers


class Terms(NamedTuple):
    """What one rank tells the others."""

    call: Call
    offer: Offer = Offer()
    payload: np.ndarray | None = None  # [R, M] int64, row r for rank r: see `Transport.meet`
    num_tokens: int = 0
    num_worst_tokens: int = 0
    counting: Counting | None = None  # instead of a payload


class Heard(NamedTuple):
    """What a compiled call has exchanged, and leaves to the engine, which goes on after it."""

    offer: Offer  # this rank's
    messages_RM: np.ndarray
    send_counts: tuple[int, ...] = ()  # of a dispatch: what this rank has told


class Agreed(NamedTuple):
    """What all ranks have told."""

    offer: Offer  # this rank's
    offers: np.ndarray  # [R, 12] the words of all ranks' offers
    payload: np.ndarray  # [R, M] int64, row r from rank r
    num_tokens: np.ndarray  # [R]
    num_worst_tokens: list[int]  # R
    numbers: np.ndarray | None  # of the counting, if there was one


class Agreement:
    def __init__(self, transport: Transport, buffer_id: int = -1) -> None:
        self._transport = transport
        self._rank, self._size = transport.rank, transport.size
        self.buffer_id = buffer_id
        self.number = 0  # of calls so far
        # Whether this rank has begun a call that the others rely on: if it cannot end that call, it
        # must tell them. False again once the call has ended, or raises on all ranks.
        self.engaged = False
        self._message = np.zeros((self._size, at.MESSAGE_WORDS), np.int64)
        # Ranks that share memory see whom they wait for; others read it from messages. What comes
        # from machines whose clocks differ is corrected by so many nanoseconds.
        self.stamped = transport.node is None
        self.waits = Waits(self._size) if transport.node is None else transport.node.mailbox.waits
        self.clocks_R = np.zeros(self._size, np.int64)

    def reject(self, stage: str, error: Exception) -> NoReturn:
        """This rank cannot make the call: raise the error here, PeerInputError on the others."""
        self.meet(stage, self.named(stage, error))
        raise AssertionError("a meeting with a failure raises") from error

    def named(self, stage: str, error: Exception) -> Exception:
        """Bad input, or a lack of memory, with the stage and the rank where it was met."""
        if type(error) is not ValueError:
            return lack_of_memory(error, stage, self._rank) or error
        return ValueError(f"{stage}: {error}, on rank {self._rank}")

    def meet(self, stage: str, terms: Terms | Exception, heard: Heard | None = None) -> Agreed:
        """Exchange terms. Raises on all ranks if one of them failed or if calls differ.

        With `heard` nothing is exchanged: a compiled call has done so.
        """
        failure = terms if isinstance(terms, Exception) else None
        if isinstance(terms, Exception):
            terms = Terms(Call(stage=STAGES.index(stage)))
        call, offer, payload, num_tokens, num_worst_tokens, counting = terms
        failed, (stage_number, _, _, *shapes) = failure is not None, call
        head = failed, stage_number, self.buffer_id, self.number, *shapes
        message = self._message
        came = time.monotonic_ns()
        message[:, : at.OFFER] = *head, num_tokens, num_worst_tokens, came
        message[:, at.OFFER : at.PAYLOAD], words = 0, offer.words
        if len(words):
            num_words = words.shape[1] if isinstance(words, np.ndarray) else len(words)
            message[:, at.OFFER : at.OFFER + num_words] = words
        width = room = 0
        if failure is not None:
            message[:, at.PAYLOAD : at.PAYLOAD + TEXT_WORDS] = error_to_words(failure)
        elif payload is not None:
            width = payload.shape[1]
            room = min(width, at.PAYLOAD_WORDS)
            message[:, at.PAYLOAD : at.PAYLOAD + room] = payload[:, :room]
        self.engaged = True
        numbers = None
        if heard is not None:
            answer = heard.messages_RM
        elif counting is None:
            answer, offer = self._transport.meet(message, offer, f"{stage} (notify)", room)
        else:
            answer, numbers = self._count(message, counting, f"{stage} (notify)")
            room = counting.payload.shape[1]
            found = counting.find(numbers)
            if found is not None:
                failed, failure = True, self.named(stage, found)

        if self.stamped and heard is None:
            self.note_stamps(came, answer[:, at.STAMP])

        # Comparing bytes takes a third of the time that comparing arrays takes.
        if failed or answer[:, : at.TOKENS].tobytes() != message[:, : at.TOKENS].tobytes():
            self._raise(stage, Call(*head[1:]), answer, failure)
        self.number += 1
        told = answer[:, at.PAYLOAD : at.PAYLOAD + room]
        if payload is not None and width > room:  # on all ranks: equal calls, equal widths
            rest = np.ascontiguousarray(payload[:, room:])
            more = self._transport.exchange(rest, f"{stage} (notify)")
            told = np.concatenate([told, more], axis=1)
        worst, offers = answer[:, at.WORST].tolist(), answer[:, at.OFFER : at.PAYLOAD]
        return Agreed(offer, offers, told, answer[:, at.TOKENS], worst, numbers)

    def compare(self, stage: str, call: Call, answer: np.ndarray) -> NoReturn:
        """Raise what ranks differ in that have told each other of a call."""
        call = call._replace(buffer=self.buffer_id, number=self.number)
        self._raise(stage, call, answer, None)
        raise AssertionError("ranks make the same call")

    def note_stamps(self, came: int, stamps_R: np.ndarray) -> None:
        """This rank came then, and the others as they say: it has waited for the last of them."""
        moments = np.where(stamps_R > 0, stamps_R - self.clocks_R, 0)
        last = int(moments.argmax())
        moment = min(int(moments[last]), time.monotonic_ns())
        if moment > came and last != self._rank:
            self.waits.note(last, came, moment)

    def _count(
        self, message: np.ndarray, counting: Counting, stage: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Exchange a message whose counts, and whether they are good, only the device knows."""
        payload, numbers = counting.payload, counting.numbers
        there = to_device(message, payload.device).clone()
        there[:, at.FAILED] = numbers[0] >= 0
        there[:, at.PAYLOAD : at.PAYLOAD + payload.shape[1]] = payload
        return self._transport.exchange_counted(there, numbers, stage)

    def confirm(self, stage: str, failure: Exception | None) -> None:
        """Ask again about what only the counts could show. Raises on all ranks if one failed."""
        words = np.zeros((self._size, 1 + TEXT_WORDS), np.int64)
        if failure is not None:
            words[:] = 1, *error_to_words(failure)
        answer = self._transport.exchange(words, f"{stage} (notify)")
        self._raise_failures(stage, answer[:, 0], answer[:, 1:], failure)

    def _raise(self, stage: str, mine: Call, answer: np.ndarray, failure: Exception | None) -> None:
        """Raise which ranks failed, or what ranks differ in."""
        failed, texts = answer[:, at.FAILED], answer[:, at.PAYLOAD : at.PAYLOAD + TEXT_WORDS]
        asks = self._transport.tells_from_device and failed.any()  # who counts there knows by now
        if asks or self._transport.agrees_by_nodes:
            own = [*mine, *error_to_words(failure)]
            told = np.tile(np.array(own, np.int64), (self._size, 1))
            told = self._transport.exchange(told, f"{stage} (failure)")
            answer[:, at.CALL : at.TOKENS], texts = np.split(told, [at.CALL_WORDS], axis=1)
        # Ranks that all called this Buffer go on with the same number.
        if (answer[:, _BUFFER] == self.buffer_id).all():
            self.number = int(answer[:, at.NUMBER].max()) + 1
        self._raise_failures(stage, failed, texts, failure)
        self.engaged = False
        raise_difference(stage, self._rank, mine, answer)

    def _raise_failures(
        self, stage: str, failed: np.ndarray, texts: np.ndarray, own: Exception | None
    ) -> None:
        if not failed.any():
            return
        self.engaged = False
        if isinstance(own, SharedMemoryError):
            own.on_all_ranks = True
        if own is not None:
            raise own
        rank = int(failed.argmax())
        raise rejected(rank, texts[rank], stage)


def raise_difference(stage: str, me: int, mine: Call, messages_RM: np.ndarray) -> None:
    """Raise what some rank's call differs in from this rank's, if one does."""
    columns = messages_RM[:, at.CALL : at.TOKENS].T.tolist()
    for term, wanted, column in zip(Call._fields, mine, columns):
        for rank, theirs in enumerate(column):
            if theirs != wanted:
                raise differ(stage, term, (me, wanted), (rank, theirs))
