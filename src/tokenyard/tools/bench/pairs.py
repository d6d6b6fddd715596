"""Dispatch and combine as a pair: few tokens, the low-latency mode, rows by expert, DeepEP V2's."""

from __future__ import annotations

import random
from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tokenyard.tools.bench.baselines import (
    GATHERED,
    GLOO,
    GlooAllToAll,
    absent,
    gathered,
    memory_ways,
    vllm_collectives,
)
from tokenyard.tools.bench.case import Case, Check, Way
from tokenyard.tools.bench.routed import Routed, Wanted, few
from tokenyard.tools.bench.shape import Shape

_MOST_LOW_LATENCY = 512  # tokens: its slots take memory for the worst case
_SIZES = 40  # calls
_PLAIN = "dispatch, combine"
_LOW_LATENCY = "low latency"


class Pair:
    """One Buffer, one routing, and the ways there and back."""

    def __init__(self, buffer: Any, shape: Shape, tokens: int) -> None:
        self.buffer, self.shape = buffer, shape
        self.routed = Routed(buffer.rank, shape, tokens)
        self.num_local = len(buffer.get_local_experts(shape.experts))
        self._outputs: dict[torch.Size, Tensor] = {}

    def output(self, recv_x: Any) -> Tensor:
        """What experts would give back: ordinary memory, in bfloat16 whatever came in."""
        shape = recv_x[0].shape if isinstance(recv_x, tuple) else recv_x.shape
        if shape not in self._outputs:
            self._outputs[shape] = torch.ones(shape, dtype=torch.bfloat16)
        return self._outputs[shape]

    def dispatch(self) -> Any:
        routed = self.routed
        x = tokenyard.per_token_cast_to_fp8(routed.x) if self.shape.fp8 else routed.x
        return self.buffer.dispatch(x, **routed.arguments)

    def plain(self, shared: bool = False) -> Tensor:
        got = self.dispatch()
        y = self.output(got.recv_x)
        if shared:
            y = self.buffer.get_next_combine_buffer(got.handle)
        return self.buffer.combine(y, got.handle).x

    def permuted(self, y: Tensor | None = None) -> Tensor:
        """Rows grouped by expert, and summed back with weights; y is experts' output."""
        routed = self.routed
        got = self.buffer.dispatch(routed.x, **routed.arguments)
        rows = tokenyard.permute(got.recv_x, got.recv_topk_idx, self.num_local)
        out = self.buffer.get_next_combine_buffer(got.handle)
        given = rows.x if y is None else y
        tokenyard.unpermute(given, rows.row_of, weights=got.recv_topk_weights, out=out)
        return self.buffer.combine(out, got.handle).x

    def by_expert(self, y: Tensor | None = None, weigh: bool = True) -> Tensor:
        routed = self.routed
        got = self.buffer.dispatch_by_expert(routed.x, **routed.arguments)
        given = got.x if y is None else y
        return self.buffer.combine_by_expert(given, got.handle, weigh=weigh)

    def prepare(self, by_expert: bool) -> tokenyard.Prepared:
        shape = self.shape
        return self.buffer.prepare(
            max_tokens=self.routed.tokens,
            hidden=shape.hidden,
            num_topk=shape.topk,
            num_experts=shape.experts,
            by_expert=by_expert,
        )

    def prepared(self, step: tokenyard.Prepared, in_place: bool = False) -> Tensor:
        routed = self.routed
        rows = step.dispatch(routed.x, routed.idx, routed.weights).x
        return step.combine(rows if in_place else self.output(rows))

    def low_latency(self, shared: bool = False) -> Tensor:
        buffer, routed = self.buffer, self.routed
        got = buffer.low_latency_dispatch(
            routed.x, routed.idx, routed.tokens, self.shape.experts, use_fp8=self.shape.fp8
        )
        y = self.output(got.recv_x)
        if shared:
            y = buffer.get_next_low_latency_combine_buffer(got.handle)
        return buffer.low_latency_combine(
            y, routed.idx, routed.weights, got.handle, zero_copy=shared
        ).combined_x

    @property
    def num_bytes(self) -> int:
        """Bytes that arrive here on the way there and on the way back, each row once a rank."""
        in_rank = self.buffer.dispatch(self.routed.x, **self.routed.arguments).handle
        return 2 * int(in_rank.is_token_in_rank.sum()) * self.routed.row_bytes

    def gloo(self) -> GlooAllToAll:
        got = self.buffer.dispatch(self.routed.x, **self.routed.arguments)
        return GlooAllToAll(self.buffer.group, self.routed.x, got.handle.is_token_in_rank)

    def case(self, ours: dict[str, Way], beside: dict[str, Way], **given: Any) -> Case:
        num_bytes = self.num_bytes
        return Case(
            label=f"{self.routed.tokens} tokens",
            ours=ours,
            beside=memory_ways(num_bytes) | beside,
            num_bytes=num_bytes,
            stats=self.buffer.stats,
            **given,
        )


def few_tokens(group: Any, shape: Shape, tokens: int) -> Generator[Case]:
    slots = tokens <= _MOST_LOW_LATENCY
    with tokenyard.Buffer(group, transport=shape.transport, low_latency_mode=slots) as buffer:
        pair = Pair(buffer, shape, tokens)
        routed = pair.routed
        by_source, by_expert = pair.prepare(False), pair.prepare(True)
        ours = {
            _PLAIN: Way(pair.plain),
            "prepared": Way(partial(pair.prepared, by_source)),
            "by expert": Way(pair.by_expert),
            "prepared, by expert": Way(partial(pair.prepared, by_expert, in_place=True)),
        }
        if slots:
            ours[_LOW_LATENCY] = Way(pair.low_latency)

        def checks() -> list[Check]:
            wanted = Wanted(few(routed))
            checks = wanted.exchange(buffer) + wanted.by_expert(buffer)
            checks += [
                ("prepared rows", by_source.dispatch(*given).x, pair.dispatch().recv_x),
                ("prepared sums", pair.prepared(by_source), pair.plain()),
                ("prepared sums by expert", pair.prepared(by_expert, True), pair.by_expert()),
            ]
            return checks + (wanted.low_latency(buffer) if slots else [])

        given = routed.x, routed.idx, routed.weights
        beside = {GLOO: Way(pair.gloo().both), GATHERED: gathered(group, *given)}
        beside |= vllm_collectives(group, *given)
        yield pair.case(ours, beside, checks=checks, base=_PLAIN, absent=absent())


def changing_sizes(group: Any, shape: Shape, tokens: int) -> Generator[Case]:
    """Numbers of tokens as requests come and go, and the same numbers in order."""
    drawn = random.Random(0)
    sizes = [drawn.randint(1, tokens) for _ in range(_SIZES)]
    with tokenyard.Buffer(group, transport=shape.transport) as buffer:
        pairs = {size: Pair(buffer, shape, size) for size in sizes}

        def calls(order: list[int], by_expert: bool = False) -> None:
            for size in order:
                pairs[size].by_expert() if by_expert else pairs[size].plain()

        largest = pairs[max(sizes)]
        yield Case(
            label=f"{_SIZES} calls of 1 to {tokens} tokens",
            ours={
                "as they come": Way(partial(calls, sizes)),
                "in order": Way(partial(calls, sorted(sizes))),
                "by expert, as they come": Way(partial(calls, sizes, True)),
                "by expert, in order": Way(partial(calls, sorted(sizes), True)),
            },
            beside={},
            checks=lambda: Wanted(few(largest.routed)).exchange(buffer),
            base="in order",
            stats=buffer.stats,
        )


def low_latency(group: Any, shape: Shape, tokens: int) -> Generator[Case]:
    with tokenyard.Buffer(group, transport=shape.transport, low_latency_mode=True) as buffer:
        pair = Pair(buffer, shape, tokens)
        ours = {
            _LOW_LATENCY: Way(pair.low_latency),
            "low latency, zero copy": Way(partial(pair.low_latency, shared=True)),
            "normal": Way(pair.plain),
            "normal, get_next_combine_buffer": Way(partial(pair.plain, shared=True)),
        }
        if not shape.fp8:
            ours["normal, permute, unpermute"] = Way(pair.permuted)
            ours["normal, by expert"] = Way(pair.by_expert)

        def checks() -> list[Check]:
            wanted = Wanted(few(pair.routed))
            return wanted.low_latency(buffer) + wanted.exchange(buffer)

        yield pair.case(
            ours,
            {GLOO: Way(pair.gloo().both)},
            checks=checks,
            base=_LOW_LATENCY,
            absent=absent(),
        )


def by_expert(group: Any, shape: Shape, tokens: int) -> Generator[Case]:
    with tokenyard.Buffer(group, transport=shape.transport) as buffer:
        pair = Pair(buffer, shape, tokens)
        got: Any = buffer.dispatch_by_expert(pair.routed.x, **pair.routed.arguments)
        ordinary = got.x.clone()  # experts that do nothing say the same every time

        def checks() -> list[Check]:
            want = pair.permuted()
            return [
                *Wanted(few(pair.routed)).by_expert(pair.buffer),
                ("sums by expert, beside permute's", pair.by_expert(), want),
                ("sums by expert of ordinary rows", pair.by_expert(ordinary), want),
            ]

        ours = {
            "by expert, in place": Way(pair.by_expert),
            "by expert, ordinary rows": Way(partial(pair.by_expert, ordinary)),
            "permute, unpermute": Way(pair.permuted),
            "permute, unpermute, ordinary rows": Way(partial(pair.permuted, ordinary)),
            _PLAIN: Way(pair.plain),
        }
        yield pair.case(ours, {}, checks=checks, base="permute, unpermute")


def elastic(group: Any, shape: Shape, tokens: int) -> Generator[Case]:
    with (
        tokenyard.Buffer(group) as buffer,
        tokenyard.ElasticBuffer(group, num_max_tokens_per_rank=tokens) as elastic,
    ):
        pair = Pair(buffer, shape, tokens)
        routed = pair.routed
        # Whole numbers: V2 adds in another order, and the sums must be equal all the same.
        routed.x = torch.arange(tokens)[:, None].expand(routed.x.shape).remainder(8).bfloat16()
        given = routed.x, routed.idx, routed.weights
        first: Any = buffer.dispatch_by_expert(*given, num_experts=shape.experts)
        ordinary = first.x.clone()

        def v2(y: Tensor | None = None) -> Tensor:
            got: Any = elastic.dispatch(*given, num_experts=shape.experts, do_expand=True)
            return elastic.combine(got.recv_x if y is None else y, got.handle).combined_x

        ours = {
            "V2, in place": Way(v2),
            "V2, ordinary rows": Way(partial(v2, ordinary)),
            "by expert, in place": Way(partial(pair.by_expert, weigh=False)),
            "by expert, ordinary rows": Way(partial(pair.by_expert, ordinary, weigh=False)),
        }

        def checks() -> list[Check]:
            few_routed = few(Routed(pair.buffer.rank, pair.shape, pair.routed.tokens))
            sums = {name: way.call() for name, way in ours.items()}
            want = pair.routed.x * pair.shape.topk
            by_spec = Wanted(few_routed).by_expert(pair.buffer, weigh=False)
            return by_spec + [(f"sums of {name}", got, want) for name, got in sums.items()]

        yield pair.case(ours, {}, checks=checks, base="by expert, in place")
