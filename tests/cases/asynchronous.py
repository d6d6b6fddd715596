"""Random programs of asynchronous calls, which must give what synchronous ones give."""

from __future__ import annotations

import random
from typing import Any

from torch import Tensor

import tokenyard
from tokenyard import EventOverlap
from tokenyard.testing import assert_same, numbered_tokens, routing

EXPERTS = 12


TOKENS = 24


def program(buffer: tokenyard.Buffer, seed: int, is_async: bool) -> list[Tensor]:
    """Random calls, each on what earlier ones left, chained by events. The same on every rank."""
    choose = random.Random(seed)
    kept: list[Tensor] = []
    routed: list[tuple[Tensor, Any, EventOverlap]] = []  # received rows, handle, event
    sums: list[tuple[Tensor, EventOverlap | None]] = []

    def fresh(turn: int) -> tuple[Tensor, EventOverlap | None]:
        return numbered_tokens(TOKENS, 64, first=1000 * turn + 100 * buffer.rank), None

    for turn in range(choose.randint(2, 9)):
        x, after = choose.choice([fresh(turn), *sums])
        kind = choose.choice(["dispatch", "cached", "combine"] if routed else ["dispatch"])
        if kind == "dispatch":
            idx, weights = routing("uniform", TOKENS, 3, EXPERTS, seed=seed + turn + buffer.rank)
            got: Any = buffer.dispatch(
                x,
                topk_idx=idx,
                topk_weights=weights,
                num_experts=EXPERTS,
                num_worst_tokens=choose.choice([0, buffer.group_size * TOKENS]),
                previous_event=after,
                async_finish=is_async,
            )
            kept += [got.recv_x, got.recv_topk_idx, got.recv_topk_weights]
            routed.append((got.recv_x, got.handle, got.event))
        elif kind == "cached":
            _, handle, _ = choose.choice(routed)
            got = buffer.dispatch(x, handle=handle, previous_event=after, async_finish=is_async)
            kept.append(got.recv_x)
            routed.append((got.recv_x, handle, got.event))
        else:
            rows, handle, event = choose.choice(routed)
            bias = choose.choice([None, fresh(turn)[0]])
            got = buffer.combine(
                rows, handle, bias=bias, previous_event=event, async_finish=is_async
            )
            kept.append(got.x)
            sums.append((got.x, got.event))
        assert (got.event.event is not None) is is_async
    if is_async:
        events = [event for *_, event in routed] + [event for _, event in sums if event]
        choose.shuffle(events)
        for event in events:
            event.current_stream_wait()
            assert event.is_over
    return kept


def both_ways(
    group: Any, transport: str, seeds: range, nodes: tuple[int, ...] | None = None
) -> int:
    with tokenyard.Buffer(group, transport=transport, ranks_per_node=nodes) as buffer:
        for seed in seeds:
            assert_same(program(buffer, seed, True), program(buffer, seed, False), f"seed {seed}")
    return len(seeds)
