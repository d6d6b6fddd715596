"""A rank whose memory runs out at one allocation of a call, for every allocation that it makes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tokenyard import Replicas, SharedMemoryError
from tokenyard.runtime import memory
from tokenyard.shm.pool import SegmentPool
from tokenyard.testing import assert_same, run_virtual
from tokenyard.wire import int64s, node_blocks

EXPERTS, TOPK, HIDDEN, TOKENS = 8, 2, 256, 12
PRIVATE: dict[str, Callable[[], Exception]] = {
    "empty": partial(RuntimeError, "DefaultCPUAllocator: can't allocate memory (injected)"),
    "empty_like": partial(RuntimeError, "DefaultCPUAllocator: can't allocate memory (injected)"),
    "small": partial(RuntimeError, "DefaultCPUAllocator: can't allocate memory (injected)"),
    "empty_array": partial(MemoryError, "injected"),
    "take_bytes": partial(MemoryError, "injected"),
}
TRANSPORTS: dict[str, dict[str, Any]] = {
    "direct": {"transport": "direct"},
    "direct, two nodes": {"transport": "direct", "ranks_per_node": 1},
    "direct with a balance": {"transport": "direct", "balance": "exact"},
    "direct with copies": {
        "transport": "direct",
        "placement": Replicas([[0, 1, 2, 3, 7], [4, 5, 6, 7, 0]]),
    },
    "ring": {"transport": "ring"},
    "collective": {"transport": "collective"},
    "hierarchical": {"transport": "hierarchical", "ranks_per_node": 1},
    "hierarchical, nodes of two": {"transport": "hierarchical", "ranks_per_node": 2},
    "hierarchical with a balance": {
        "transport": "hierarchical",
        "ranks_per_node": 2,
        "balance": "exact",
    },
    "by nodes": {"transport": "hierarchical", "ranks_per_node": 2, "by_nodes": True},
}


class Injection:
    """Counts the allocations of one thread, and fails one of them."""

    def __init__(self) -> None:
        self.thread, self.left, self.place = 0, 0, ""

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """In this thread the allocation of that number fails, from 0 on."""
        self.thread, self.left, self.place = threading.get_ident(), number, ""
        try:
            yield
        finally:
            self.thread = 0

    def fails(self, place: str) -> bool:
        self.left -= 1
        if self.left != -1:
            return False
        self.place = place
        return True

    @contextmanager
    def installed(self) -> Iterator[None]:
        kept: list[tuple[Any, str, Any]] = []

        def replace(holder: Any, name: str, error: Callable[[], Exception]) -> None:
            plain = getattr(holder, name)
            kept.append((holder, name, plain))

            def allocate(*args: Any, **named: Any) -> Any:
                if threading.get_ident() != self.thread:
                    return plain(*args, **named)
                if self.fails(name):
                    raise error()  # a new one: its traceback holds the Buffer
                thread, self.thread = self.thread, 0  # one allocation, whatever it is made of
                try:
                    return plain(*args, **named)
                finally:
                    self.thread = thread

            setattr(holder, name, allocate)

        for name, error in PRIVATE.items():
            replace(memory, name, error)
        replace(int64s, "new", partial(MemoryError, "injected"))
        for name in ("take", "take_small"):
            replace(SegmentPool, name, partial(SharedMemoryError, "no shared memory (injected)"))
        try:
            yield
        finally:
            for holder, name, plain in kept:
                setattr(holder, name, plain)


@dataclass
class Found:
    """What a walk has found."""

    injected: int = 0
    raised: int = 0
    broken: list[str] = field(default_factory=list)  # places after which the Buffer is broken
    wrong: list[str] = field(default_factory=list)


def given(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    tokens = TOKENS + rank
    x = torch.randint(-3, 4, (tokens, HIDDEN), generator=draw).float()
    ids = torch.rand(tokens, EXPERTS, generator=draw).topk(TOPK).indices
    return x, ids, torch.randint(1, 4, ids.shape, generator=draw).float()


def fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.to(torch.float8_e4m3fn), torch.ones(len(x), HIDDEN // 128)


Call = Callable[[], Any]


def calls_of(buffer: Any, layout: str) -> Call:
    """A call of this layout, ready to be made again and again."""
    rank = buffer.rank
    x, ids, weights = given(rank)
    more: Any = {"topk_idx": ids, "topk_weights": weights, "num_experts": EXPERTS}
    source = partial(buffer.dispatch, x, **more)
    expert = partial(buffer.dispatch_by_expert, x, ids, weights, num_experts=EXPERTS)
    if layout == "by source":
        return lambda: _plain(source())
    if layout == "by source, FP8":
        return lambda: _plain(buffer.dispatch(fp8(x), **more))
    if layout == "worst tokens":
        return lambda: _plain(source(num_worst_tokens=4 * TOKENS * buffer.group_size))
    if layout == "asynchronous":

        def later() -> Any:
            got = source(async_finish=True)
            got.event.current_stream_wait()
            return _plain(got)

        return later
    if layout == "by expert":
        return lambda: (lambda got: (got.x, got.offsets))(expert())
    if layout == "by expert, FP8":
        fp8_rows = partial(buffer.dispatch_by_expert, fp8(x), ids, weights, num_experts=EXPERTS)
        return lambda: (lambda got: (*got.x, got.offsets))(fp8_rows(expert_alignment=4))
    if layout == "all_gather":
        return lambda: buffer.all_gather(x).x
    if layout.startswith("combine by expert"):
        got = expert()
        return lambda: buffer.combine_by_expert(got.x, got.handle)
    if layout.startswith("prepared"):
        by_expert = "expert" in layout
        step = buffer.prepare(
            max_tokens=2 * TOKENS,
            hidden=HIDDEN,
            num_topk=TOPK,
            num_experts=EXPERTS,
            dtype=torch.float32,
            by_expert=by_expert,
        )

        def both() -> Any:
            rows = step.dispatch(x, ids, weights)
            return rows.x.clone(), step.combine(rows.x)

        return both
    handle = source()
    y = handle.recv_x.clone()
    if layout == "cached dispatch":
        return lambda: buffer.dispatch(x, handle=handle.handle).recv_x
    if layout == "combine":
        return lambda: buffer.combine(y, handle.handle).x
    if layout == "combine of shared rows, with weights and biases":
        w, bias = handle.recv_topk_weights.clone(), torch.ones_like(x)
        rows = handle.recv_x
        given_all: Any = {"topk_weights": w, "bias": bias, "out": torch.empty_like(x)}
        return lambda: tuple(buffer.combine(rows, handle.handle, **given_all)[:2])
    raise AssertionError(layout)


def low_latency(buffer: Any, layout: str) -> Call:
    x, ids, weights = given(buffer.rank)
    x = x.bfloat16()

    def both() -> Any:
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(
            x, ids, 2 * TOKENS, EXPERTS, use_fp8=False
        )
        sums = buffer.low_latency_combine(torch.ones_like(rows), ids, weights, handle)[0]
        return counts.clone(), sums

    return both


def elastic(buffer: Any, layout: str) -> Call:
    x, ids, weights = given(buffer.rank)
    x = x.bfloat16()

    def both() -> Any:
        got = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=EXPERTS,
            do_expand="expand" in layout,
        )
        rows, handle = got[0], got[3]
        again = buffer.dispatch(
            x, topk_weights=weights, handle=handle, do_expand="expand" in layout
        )
        return rows.float().sum(), again[0], again[2], buffer.combine(rows, handle)[0]

    return both


def hybrid(buffer: Any, layout: str) -> Call:
    x, ids, weights = given(buffer.rank)
    probs = torch.zeros(len(x), EXPERTS).scatter_(1, ids, weights)
    more: Any = {"routing_map": probs > 0, "probs": probs}

    def both() -> Any:
        got = buffer.dispatch_with_permute(hidden=x, **more)
        rows, row_probs, handle = got[0], got[1], got[4]
        again = buffer.dispatch_with_permute(hidden=x, probs=probs, handle=handle)
        sums = buffer.combine_with_unpermute(hidden=rows, probs=row_probs, handle=handle)
        return rows, row_probs, again[0], again[1], *sums

    return both


def _plain(got: Any) -> Any:
    rows = got.recv_x if isinstance(got.recv_x, tuple) else (got.recv_x,)
    return *rows, got.recv_topk_idx, got.recv_topk_weights, got.num_recv_tokens_per_expert_list


LAYOUTS = (
    "by source",
    "by source, FP8",
    "worst tokens",
    "asynchronous",
    "by expert",
    "by expert, FP8",
    "all_gather",
    "combine by expert",
    "prepared by expert",
    "prepared by source",
    "cached dispatch",
    "combine",
    "combine of shared rows, with weights and biases",
)


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [copied(one) for one in value] if isinstance(value, (tuple, list)) else value


def open_one(group: Any, layout: str, options: dict[str, Any]) -> tuple[Any, Call]:
    if layout.startswith("elastic"):
        opened: Any = tokenyard.ElasticBuffer(
            group, num_max_tokens_per_rank=2 * TOKENS, hidden=HIDDEN, num_topk=TOPK, **options
        )
        return opened, elastic(opened, layout)
    if layout == "hybrid":
        opened = tokenyard.HybridEPBuffer(group, HIDDEN, 2 * TOKENS, EXPERTS // 2, **options)
        return opened, hybrid(opened, layout)
    is_low = layout == "low latency"
    opened = tokenyard.Buffer(group, timeout=scaled(60), low_latency_mode=is_low, **options)
    return opened, (low_latency if is_low else calls_of)(opened, layout)


def walk(
    num_ranks: int, layout: str, transport: str, *, warm: int, most: int = 200, culprit: int = 1
) -> Found:
    """Fail every allocation of a call on one rank, each in a Buffer of its own, after so many calls
    without a failure.
    """
    options = dict(TRANSPORTS[transport])
    injection, found, barrier = Injection(), Found(), threading.Barrier(num_ranks)
    said: list[Any] = [None] * num_ranks

    def job(group: Any) -> None:
        rank = group.rank()
        for number in range(most):
            buffer, call = open_one(group, layout, options)
            want = None
            for _ in range(warm):
                want = copied(call())
            barrier.wait()
            one = after = "right"
            try:
                if rank == culprit:
                    with injection.at(number):
                        got = call()
                else:
                    got = call()
                if want is not None:
                    assert_same(copied(got), want)
            except Exception as error:
                one = f"{type(error).__name__}: {error}"
            barrier.wait()
            try:
                next_one = copied(call())
                if want is not None:
                    assert_same(next_one, want)
            except Exception as error:
                after = f"{type(error).__name__}: {error}"
            said[rank] = one, after
            barrier.wait()
            if rank == 0:
                judge(found, injection.place, number, list(said), culprit)
            buffer.close() if hasattr(buffer, "close") else buffer.destroy()
            done = not injection.place
            barrier.wait()
            if done:
                return
        raise AssertionError(f"more than {most} allocations")

    least, node_blocks.LEAST_RANKS = (
        node_blocks.LEAST_RANKS,
        2 if options.pop("by_nodes", 0) else 256,
    )
    try:
        with injection.installed():
            run_virtual(job, num_ranks, timeout=scaled(300))
    finally:
        node_blocks.LEAST_RANKS = least
    return found


def judge(found: Found, place: str, number: int, said: list[Any], culprit: int) -> None:
    """Either the call works, or all ranks raise and the Buffer goes on. Or, where pages say so, it
    is broken on all ranks. A PeerTimeout is wrong anywhere: nobody may wait for what never comes.
    """
    if not place:
        return
    found.injected += 1
    kinds, after = ([text.split(":")[0] for text in texts] for texts in zip(*said))
    found.raised += kinds[culprit] != "right"
    text = f"{place} {number}: {kinds} then {after}"
    if set(after) == {"right"}:
        whole = set(kinds) == {"right"} or set(kinds) <= {"SharedMemoryError"}
        if not whole:
            found.wrong.append(text + str(said))
    elif (
        kinds[culprit] in ("SharedMemoryError", "RuntimeError", "MemoryError")
        and "right" not in after
        and {*kinds, *after} <= {"right", "PeerLeft", "BufferClosed", kinds[culprit]}
    ):
        found.broken.append(text)
    else:
        found.wrong.append(text + str(said))
