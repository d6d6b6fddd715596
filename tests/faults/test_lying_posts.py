"""Low-latency calls on shared memory in which one word of a peer is wrong."""

from __future__ import annotations

import ctypes
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
from tokenyard.engine.agreement import Call
from tokenyard.low_latency.handle import COMBINE, DISPATCH, STAGE_OF
from tokenyard.testing import Processes
from tokenyard.wire import message as say
from tokenyard.wire.columns import column_offsets

FAR = 1 << 44
NUM_TOKENS = 4
ROWS = say.SEGMENTS + say.SEGMENT_WORDS  # where a combine tells of its rows


def words(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))


class Liar:
    """A rank's own words of the call that it has just sent, the first of its kind."""

    def __init__(self, buffer: tokenyard.Buffer, kind: int) -> None:
        self._masks, self._place = slots_of(buffer).masks, slots_of(buffer).places[2 * kind + 1]

    def message(self, rank: int) -> np.ndarray:
        """What it has told a rank."""
        mailbox = self._place.mailbox
        boxes = words(mailbox._boxes[mailbox.num_sent % 2][0], rank + 1)
        return words(int(boxes[rank]), say.MESSAGE_WORDS)

    @property
    def experts(self) -> np.ndarray:
        """Those of its tokens, in the block of a dispatch."""
        (shape,) = self._place.plans
        begin = column_offsets(NUM_TOKENS, shape.widths)[2]
        return words(self._place.block.address + begin, NUM_TOKENS * shape.num_topk)

    def firsts(self, rank: int) -> np.ndarray:
        """Where the rows of each expert begin that a combine gives back to a rank."""
        ((shape, _),) = self._place.plans
        begin = self._place.block.address + rank * shape.firsts_bytes
        return words(begin, shape.placement.most_experts)

    def leave_out(self, rank: int) -> None:
        self._masks._own[rank] = 1


Lie = Callable[[Liar], None]


def lie(word: int, value: int) -> Lie:
    def tell(liar: Liar) -> None:
        liar.message(0)[word] = value

    return tell


def add(word: int, value: int) -> Lie:
    def tell(liar: Liar) -> None:
        liar.message(0)[word] += value

    return tell


def term(name: str, value: int) -> Lie:
    return lie(say.CALL + Call._fields.index(name), value)


def write_expert(place: int, value: int) -> Lie:
    return lambda liar: liar.experts.put(place, value)


def write_first(value: int) -> Lie:
    return lambda liar: liar.firsts(0).put(0, value)


ANY: dict[str, Lie] = {
    "size-0": lie(say.SEGMENTS + say.SEGMENT_SIZE, 0),
    "size-64": lie(say.SEGMENTS + say.SEGMENT_SIZE, 64),
    "size-far": lie(say.SEGMENTS + say.SEGMENT_SIZE, FAR),
    "size-below": lie(say.SEGMENTS + say.SEGMENT_SIZE, -4096),
    "fd-none": lie(say.SEGMENTS + say.SEGMENT_FD, -1),
    "fd-far": lie(say.SEGMENTS + say.SEGMENT_FD, FAR),
    "fd-other": lie(say.SEGMENTS + say.SEGMENT_FD, 0),
    "identity": lie(say.SEGMENTS + say.SEGMENT_IDENTITY, 5),
    "identity-0": lie(say.SEGMENTS + say.SEGMENT_IDENTITY, 0),
    "identity-below": lie(say.SEGMENTS + say.SEGMENT_IDENTITY, -1),
    "left-out": lambda liar: liar.leave_out(0),
}
DISPATCHES: dict[str, Lie] = {
    "tokens": lie(say.TOKENS, NUM_TOKENS + 1),
    "tokens-far": lie(say.TOKENS, FAR),
    "tokens-below": lie(say.TOKENS, -1),
    "expert": write_expert(1, 6),
    "expert-far": write_expert(0, FAR),
    "expert-below": write_expert(0, -2),
}
# With zero_copy, so that the rows lie in a segment of their own.
COMBINES: dict[str, Lie] = {
    "rows-begin": lie(ROWS + say.SEGMENT_BEGIN, FAR),
    "rows-begin-end": add(ROWS + say.SEGMENT_BEGIN, 1 << 24),
    "rows-begin-below": lie(ROWS + say.SEGMENT_BEGIN, -64),
    "rows-size-0": lie(ROWS + say.SEGMENT_SIZE, 0),
    "rows-size-far": lie(ROWS + say.SEGMENT_SIZE, FAR),
    "rows-fd": lie(ROWS + say.SEGMENT_FD, -1),
    "rows-identity": lie(ROWS + say.SEGMENT_IDENTITY, 7),
    "rows-identity-0": lie(ROWS + say.SEGMENT_IDENTITY, 0),
    "rows-identity-below": lie(ROWS + say.SEGMENT_IDENTITY, -1),
    "firsts": write_first(FAR),
    "firsts-end": write_first(1 << 20),
    "firsts-below": write_first(-1),
}
STRAYS = {DISPATCH: {**ANY, **DISPATCHES}, COMBINE: {**ANY, **COMBINES}}
# Words that must be the same on all ranks.
DIFFERENCES: dict[str, Lie] = {
    "stage": term("stage", 77),
    "stage-other": term("stage", 1),
    "stage-below": term("stage", -1),
    "buffer": term("buffer", 5),
    "number": add(say.NUMBER, 1),
    "number-far": add(say.NUMBER, FAR),
    "handle": term("handle", 3),
    "handle-far": term("handle", FAR),
    "hidden": term("hidden", -5),
    "dtype": term("dtype", 0),
    "dtype-77": term("dtype", 77),
    "dtype-below": term("dtype", -99),
    "scales-dtype": term("scales_dtype", 77),
    "topk": term("num_topk", 3),
    "experts": term("num_experts", FAR),
    "num-max": term("num_max", 5),
    "cast": term("cast", 3),
    "cast-9": term("cast", 9),
    "options": term("options", 9),
}


def tell_lies(group: Any, kind: int, lies: dict[str, Lie]) -> dict[str, list[str]]:
    """Rank 1 writes one wrong word between sending and the moment when others may read."""
    heard = {}
    # Opened beforehand: words about a failure in one reach those that the group opens just then.
    buffers = [tokenyard.Buffer(group, low_latency_mode=True, timeout=scaled(60)) for _ in lies]
    for (name, tell), buffer in zip(lies.items(), buffers):
        again = partial(Rounds(buffer, num_experts=6).dispatch, 1)
        idx, weights = torch.tensor([[0, 3]] * NUM_TOKENS), torch.ones(NUM_TOKENS, 2)
        x = torch.ones(NUM_TOKENS, 16)
        later: dict[str, Any] = {"return_recv_hook": True}
        got: Any = buffer.low_latency_dispatch(x, idx, NUM_TOKENS, 6, use_fp8=False, **later)
        if kind == COMBINE:
            got.hook()
            y = buffer.get_next_low_latency_combine_buffer(got.handle).copy_(got.recv_x)
            got = buffer.low_latency_combine(y, idx, weights, got.handle, zero_copy=True, **later)
        if group.rank() == 1:
            tell(Liar(buffer, kind))
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


def tell_strays(group: Any, kind: int) -> dict[str, list[str]]:
    return tell_lies(group, kind, STRAYS[kind])


def tell_differences(group: Any, kind: int) -> dict[str, list[str]]:
    return tell_lies(group, kind, DIFFERENCES)


pytestmark = [pytest.mark.faults, pytest.mark.processes, pytest.mark.timeout(200)]
KINDS = pytest.mark.parametrize("kind", [DISPATCH, COMBINE], ids=["dispatch", "combine"])


@KINDS
def test_a_wrong_word_names_its_rank_and_harms_nobody(kind: int) -> None:
    with Processes(2, timeout=scaled(180)) as ranks:
        reader, liar = ranks.run(tell_strays, kind, may_die=True)
    assert isinstance(reader, dict), reader
    assert isinstance(liar, dict), liar
    for name, (first, second) in reader.items():
        # The liar reads its own words too, and may be the first to say so.
        want = f"{STAGE_OF[kind]}: rank 1 wrote what no rank writes, on rank"
        assert want in first, f"{name}: {first}"
        assert first.startswith(("PeerError: ", "PeerLeft: ")), f"{name}: {first}"
        assert second.startswith("BufferClosed: "), f"{name}: {second}"
    for name, (first, second) in liar.items():
        for said in (first, second):
            known = ("", "BufferClosed", "PeerLeft", "PeerError")
            assert said.split(":")[0] in known, f"{name}: {said}"


@KINDS
def test_a_wrong_word_of_the_call_is_a_mismatch(kind: int) -> None:
    with Processes(2, timeout=scaled(180)) as ranks:
        reader, liar = ranks.run(tell_differences, kind, may_die=True)
    assert isinstance(reader, dict), reader
    assert isinstance(liar, dict), liar
    for name, (first, second) in reader.items():
        assert first.startswith((f"CallMismatch: {STAGE_OF[kind]}: ", "PeerError: ")), (name, first)
        assert "rank 1" in first, f"{name}: {first}"
        assert second == "" or first.startswith("PeerError: "), f"{name}: {second}"
    assert set(liar) == set(reader)
