"""Compiled calls, within a node and between nodes: which there are, and that they are alike."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tests.cases.inside import NOWHERE, POSTED, leave_compiled_calls_at
from tokenyard.testing import assert_same, numbered_tokens, routing

NUM_EXPERTS = 12

Change = Callable[[dict[str, Any]], dict[str, Any]]


def spread(x: Tensor) -> Tensor:
    """The same numbers, not next to each other."""
    return x.repeat_interleave(2, dim=1)[:, ::2]


# Changes of a call that leave it compiled, and changes that do not.
PLAIN: dict[str, Change] = {
    "as it is": lambda _: {},
    "aligned": lambda _: {"expert_alignment": 8},
    "tagged": lambda _: {"tag": 7},
    "another config": lambda _: {"config": tokenyard.Config(4)},
    "no tokens": lambda g: {
        name: g[name][:0].contiguous() for name in ("x", "topk_idx", "topk_weights")
    },
    "a gradient that nobody wants": lambda g: {"x": g["x"].float().requires_grad_()},
}
# Those that are about tensors, and not about options that calls by expert do not have.
TENSORS: dict[str, Change] = {
    "strided x": lambda g: {"x": spread(g["x"])},
    "strided ids": lambda g: {"topk_idx": spread(g["topk_idx"])},
    "strided weights": lambda g: {"topk_weights": spread(g["topk_weights"])},
    "a parameter": lambda g: {"x": torch.nn.Parameter(g["x"], requires_grad=False)},
    "negated": lambda g: {"x": torch._neg_view(g["x"])},
    "with scales": lambda g: {"x": (g["x"].to(torch.float8_e4m3fn), torch.ones(9, 1))},
}
OTHER: dict[str, Change] = {
    **TENSORS,
    "more rows than arrive": lambda _: {"num_worst_tokens": 64},
    "asynchronous": lambda _: {"async_finish": True},
    "after an event": lambda _: {"previous_event": tokenyard.Buffer.capture()},
}


def inputs(rank: int, turn: int = 0, num_tokens: int = 9, hidden: int = 40) -> dict[str, Any]:
    x = numbered_tokens(num_tokens, hidden, first=1000 * turn + 100 * rank)
    topk_idx, weights = routing("holes", num_tokens, 4, NUM_EXPERTS, seed=10 * turn + rank)
    return {"x": x, "topk_idx": topk_idx, "topk_weights": weights, "num_experts": NUM_EXPERTS}


def open_buffer(group: Any, sizes: tuple[int, ...]) -> tokenyard.Buffer:
    """On nodes of these sizes. Ranks of several have heard how much they will enclose."""
    transport = "direct" if len(sizes) == 1 else "hierarchical"
    buffer = tokenyard.Buffer(
        group, transport=transport, ranks_per_node=list(sizes), timeout=scaled(60)
    )
    for _ in sizes[1:3]:
        got: Any = buffer.dispatch(**inputs(group.rank(), num_tokens=64))
        buffer.combine(got.recv_x, got.handle)
    return buffer


def way_of(buffer: tokenyard.Buffer, stage: str = "dispatch") -> str:
    """Of the calls since somebody has asked for it."""
    (way,) = [way for way, made in buffer.stats(reset=True)["ways"][stage].items() if made]
    return str(way)


@torch.no_grad()
def which_are_compiled(
    group: Any, changes: Iterable[str], sizes: tuple[int, ...] = (2,)
) -> dict[str, bool]:
    out = {}
    with open_buffer(group, sizes) as buffer:
        for name in changes:
            buffer.stats(reset=True)
            given = inputs(group.rank())
            got: Any = buffer.dispatch(**{**given, **{**PLAIN, **OTHER}[name](given)})
            received = got.recv_x[0] if isinstance(got.recv_x, tuple) else got.recv_x
            buffer.combine(torch.zeros(received.shape), got.handle)
            out[name] = way_of(buffer) == "compiled"
    return out


def fields(handle: tokenyard.Handle) -> list[Any]:
    flow = handle.flow
    known = [flow.tokens_R.tolist(), flow.most_rows, flow.route.send_token]
    return [*handle, *known, list(flow.route.send_counts), list(flow.recv_counts)]


def both_ways(group: Any, sizes: tuple[int, ...]) -> None:
    """Results and handles, whichever way made them, hold the same and serve the same calls."""
    rank = group.rank()
    with open_buffer(group, sizes) as buffer:
        for turn, dtype in enumerate([torch.bfloat16, torch.float16, torch.float32, torch.float64]):
            given = inputs(rank, turn, num_tokens=(turn * 3 + rank * 5) % 9)
            given |= {"x": given["x"].to(dtype), "expert_alignment": 1 + turn % 2}
            buffer.stats(reset=True)
            quick: Any = buffer.dispatch(**given)
            assert way_of(buffer) == "compiled"
            leave_compiled_calls_at(buffer, POSTED)
            slow: Any = buffer.dispatch(**given)
            assert way_of(buffer) == "enclosed"
            assert_same(list(quick[:4]), list(slow[:4]))
            y = quick.recv_x * 2
            want = buffer.combine(y, slow.handle).x
            assert_same(buffer.combine(y, quick.handle).x, want)
            leave_compiled_calls_at(buffer, NOWHERE)
            for handle in (
                quick.handle,
                replace(quick.handle, hidden=40),
                copy.deepcopy(quick.handle),
                pickle.loads(pickle.dumps(quick.handle)),
            ):
                assert_same(buffer.combine(y, handle).x, want)
                assert_same(buffer.dispatch(given["x"], handle=handle).recv_x, quick.recv_x)
                assert_same(fields(handle), fields(slow.handle))


def leave_and_go_on(group: Any, sizes: tuple[int, ...], phase: int) -> list[Tensor]:
    """Rank 1 leaves its compiled calls at this phase; the others do not."""
    out = []
    with open_buffer(group, sizes) as buffer:
        for turn in range(5):
            leave_compiled_calls_at(buffer, phase if group.rank() == 1 else NOWHERE)
            got: Any = buffer.dispatch(**inputs(group.rank(), turn, (turn * 3 + buffer.rank) % 9))
            y = got.recv_x if turn % 2 else got.recv_x.clone()
            out += [*(part.clone() for part in got[:3]), buffer.combine(y, got.handle).x]
    return out
