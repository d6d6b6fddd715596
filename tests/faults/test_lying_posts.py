"""Low-latency calls on shared memory in which one word of a peer is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tokenyard
from tests.cases.clock import scaled
from tests.cases.inside import slots_of
from tests.cases.low_latency_rounds import Rounds
from tokenyard.low_latency.posts import words
from tokenyard.testing import Processes
from tokenyard.wire import slots

FAR = 1 << 44


class Liar:
    """A rank's own words of the call that it has just sent."""

    def __init__(self, buffer: tokenyard.Buffer, kind: int, number: int) -> None:
        self._slots = slots_of(buffer)
        self._place = 2 * kind + number % 2
        self._rank = buffer.rank

    @property
    def post(self) -> np.ndarray:
        return words(self._slots.posts[self._place].own, slots.POST_WORDS)

    @property
    def block(self) -> np.ndarray:
        return words(self._slots.blocks[self._place].address, 16)

    def table(self, rank: int) -> np.ndarray:
        """What a combine tells a rank: lines of 64 bytes here."""
        return self.block[8 * rank :]

    def leave_out(self, rank: int) -> None:
        words(self._slots.posts._own_masks, 2)[rank] = 1


Lie = Callable[[Liar], None]


def lie(word: int, value: int) -> Lie:
    def tell(liar: Liar) -> None:
        liar.post[word] = value

    return tell


def add(word: int, value: int) -> Lie:
    def tell(liar: Liar) -> None:
        liar.post[word] += value

    return tell


def lie_twice(term: int, value: int) -> Lie:
    def tell(liar: Liar) -> None:
        liar.post[slots.SIGNATURE] += 2
        liar.post[slots.TERMS + term] = value

    return tell


def write(place: int, value: int) -> Lie:
    def tell(liar: Liar) -> None:
        liar.block[place] = value

    return tell


ANY: dict[str, Lie] = {
    "far-ahead": add(slots.NUMBER, FAR + 1),
    "next-number": add(slots.NUMBER, 1),
    "signature": add(slots.SIGNATURE, 2),
    "dtype": lie_twice(slots.DTYPE_TERM, 77),
    "negative-dtype": lie_twice(slots.DTYPE_TERM, -99),
    "cast": lie_twice(5, 9),
    "negative-size": lie_twice(1, -1),
    "size-0": lie(slots.SIZE, 0),
    "size-64": lie(slots.SIZE, 64),
    "size-far": lie(slots.SIZE, FAR),
    "size-below": lie(slots.SIZE, -4096),
    "fd-none": lie(slots.FD, -1),
    "fd-far": lie(slots.FD, FAR),
    "fd-other": lie(slots.FD, 0),
    "identity": lie(slots.IDENTITY, 5),
    "identity-unknown": lie(slots.IDENTITY, -1),
    "left-out": lambda liar: liar.leave_out(0),
}
DISPATCHES: dict[str, Lie] = {
    "tokens": lie(slots.TOKENS, 5),
    "tokens-far": lie(slots.TOKENS, FAR),
    "tokens-below": lie(slots.TOKENS, -1),
    "handle": lie(slots.HANDLE, 3),
    "expert": write(1, 6),
    "expert-far": write(0, FAR),
    "expert-below": write(0, -2),
}
COMBINES: dict[str, Lie] = {
    "handle-0": lie(slots.HANDLE, 0),
    "rows-begin": lie(slots.ROWS_BEGIN, FAR),
    "rows-begin-end": add(slots.ROWS_BEGIN, 1 << 16),
    "rows-begin-below": lie(slots.ROWS_BEGIN, -64),
    "rows-size-0": lie(slots.ROWS_SIZE, 0),
    "rows-size-far": lie(slots.ROWS_SIZE, FAR),
    "rows-identity": lie(slots.ROWS_IDENTITY, 7),
    "rows-identity-unknown": lie(slots.ROWS_IDENTITY, -1),
    "table": lambda liar: liar.table(0).put(0, FAR),
    "table-end": lambda liar: liar.table(0).put(0, 1 << 20),
    "table-below": lambda liar: liar.table(0).put(0, -1),
}
CASES = {slots.DISPATCH: {**ANY, **DISPATCHES}, slots.COMBINE: {**ANY, **COMBINES}}


def tell_lies(group: Any, kind: int) -> dict[str, list[str]]:
    """Rank 1 writes one wrong word between sending and the moment when others may read."""
    heard, cases = {}, CASES[kind]
    # Opened beforehand: words about a failure in one reach those that the group opens just then.
    buffers = [tokenyard.Buffer(group, low_latency_mode=True, timeout=scaled(60)) for _ in cases]
    for (name, tell), buffer in zip(cases.items(), buffers):
        again = partial(Rounds(buffer, num_experts=6).dispatch, 1)
        idx, weights = torch.tensor([[0, 3]] * 4), torch.ones(4, 2)
        got: Any = buffer.low_latency_dispatch(
            torch.ones(4, 16), idx, 4, 6, use_fp8=False, return_recv_hook=True
        )
        if kind == slots.COMBINE:
            got.hook()
            got = buffer.low_latency_combine(
                got.recv_x.clone(), idx, weights, got.handle, return_recv_hook=True
            )
        if group.rank() == 1:
            tell(Liar(buffer, kind, 1))
        dist.barrier(group)
        said = ["", ""]
        for turn, call in enumerate((got.hook, again)):
            try:
                call()
            except Exception as error:
                said[turn] = f"{type(error).__name__}: {error}"
            dist.barrier(group)  # the liar may be the first to see it, and must not be gone then
        heard[name] = said
        buffer.close()
        dist.barrier(group)
    return heard


@pytest.mark.faults
@pytest.mark.processes
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", [slots.DISPATCH, slots.COMBINE], ids=["dispatch", "combine"])
def test_a_wrong_word_names_its_rank_and_harms_nobody(kind: int) -> None:
    with Processes(2, timeout=scaled(180)) as ranks:
        reader, liar = ranks.run(tell_lies, kind, may_die=True)
    assert isinstance(reader, dict), reader
    assert isinstance(liar, dict), liar
    stage = ("low-latency dispatch", "low-latency combine")[kind]
    for name, (first, second) in reader.items():
        # The liar reads its own words too, and may be the first to say so.
        want = f"{stage}: rank 1 wrote what no rank writes, on rank"
        assert want in first, f"{name}: {first}"
        assert first.startswith(("PeerError: ", "PeerLeft: ")), f"{name}: {first}"
        assert second.startswith("BufferClosed: "), f"{name}: {second}"
    for name, (first, second) in liar.items():
        for said in (first, second):
            known = ("", "BufferClosed", "PeerLeft", "PeerError")
            assert said.split(":")[0] in known, f"{name}: {said}"
