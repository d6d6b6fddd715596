"""Dispatch, and combine, between the ranks of one machine."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import tokenyard
from tokenyard.tools.bench.baselines import GLOO, MEMCPY, GlooAllToAll, absent, memory_ways
from tokenyard.tools.bench.case import Case, Check, Way
from tokenyard.tools.bench.routed import Routed, Wanted, few
from tokenyard.tools.bench.shape import Shape


def _wait(got: Any) -> None:
    got.event.current_stream_wait()


class Exchange:
    """One Buffer, one routing: what both benchmarks need."""

    def __init__(self, buffer: Any, shape: Shape, tokens: int) -> None:
        self.buffer = buffer
        self.routed = Routed(buffer.rank, shape, tokens)
        self.got = self.dispatch()
        self.rows = self.got.recv_x.clone()
        self.in_rank = self.got.handle.is_token_in_rank
        self.gloo = GlooAllToAll(buffer.group, self.routed.x, self.in_rank)

    def dispatch(self, **options: Any) -> Any:
        return self.buffer.dispatch(self.routed.x, **self.routed.arguments, **options)

    def checks(self) -> list[Check]:
        """A few tokens against the specification, all of them against gloo."""
        checks = Wanted(few(self.routed)).exchange(self.buffer)
        got = self.dispatch()
        rows = got.recv_x.clone()
        sums = self.buffer.combine(rows, got.handle).x
        by_gloo = self.gloo.dispatch()
        checks.append(("dispatched rows, beside gloo's", rows, by_gloo))
        checks.append(("combined sums, beside gloo's", sums, self.gloo.combine(by_gloo)))
        return checks

    def case(self, ours: dict[str, Way], gloo: Way, num_rows: int) -> Case:
        num_bytes = num_rows * self.routed.row_bytes
        return Case(
            label=f"{self.routed.tokens} tokens",
            ours=ours,
            beside={**memory_ways(num_bytes), GLOO: gloo},
            checks=self.checks,
            base=MEMCPY,
            num_bytes=num_bytes,
            stats=self.buffer.stats,
            absent=absent(),
        )


def dispatch(group: Any, shape: Shape, tokens: int) -> Generator[Case]:
    with tokenyard.Buffer(group, transport=shape.transport) as buffer:
        this = Exchange(buffer, shape, tokens)
        x, handle = this.routed.x, this.got.handle
        yield this.case(
            {
                "dispatch": Way(this.dispatch),
                "dispatch, cached handle": Way(lambda: buffer.dispatch(x, handle=handle)),
                "dispatch, async_finish, until it returns": Way(
                    lambda: this.dispatch(async_finish=True), _wait
                ),
            },
            Way(this.gloo.dispatch),
            len(this.rows),
        )


def combine(group: Any, shape: Shape, tokens: int) -> Generator[Case]:
    with tokenyard.Buffer(group, transport=shape.transport) as buffer:
        this = Exchange(buffer, shape, tokens)
        rows, handle = this.rows, this.got.handle
        shared = buffer.get_next_combine_buffer(handle).copy_(rows)
        this.gloo.dispatch()  # tells it how many rows it has to send back
        yield this.case(
            {
                "combine": Way(lambda: buffer.combine(rows, handle)),
                "combine, get_next_combine_buffer": Way(lambda: buffer.combine(shared, handle)),
                "combine, async_finish, until it returns": Way(
                    lambda: buffer.combine(rows, handle, async_finish=True), _wait
                ),
            },
            Way(lambda: this.gloo.combine(rows)),
            int(this.in_rank.sum()),
        )
