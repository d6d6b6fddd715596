"""What calls return and users hold: how each is made, and what it then gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tokenyard.compat.hybrid_ep import HybridEPBuffer
from tokenyard.nn import functional
from tokenyard.runtime.events import EventHandle, EventOverlap

E, K, T, D = 8, 2, 16, 128
Use = Callable[[Any], Any]  # gives the same again of each copy
Made = tuple[Any, Use]


def opened(group: Any, kind: str, options: dict[str, Any]) -> Any:
    if kind == "elastic":
        sizes: Any = {"num_max_tokens_per_rank": T, "hidden": D, "num_topk": K}
        return tokenyard.ElasticBuffer(group, **sizes, **options)
    if kind == "hybrid":
        return HybridEPBuffer(group, D, T, E // group.size(), **options)
    return tokenyard.Buffer(group, low_latency_mode=kind == "low latency", **options)


def routed(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, topk_idx and topk_weights."""
    drawn = torch.Generator().manual_seed(rank)
    x, topk_idx = torch.randn(T, D, generator=drawn), torch.rand(T, E, generator=drawn)
    return x, topk_idx.topk(K).indices, torch.rand(T, K, generator=drawn)


def told(value: Any) -> Any:
    """What a value of plain fields says."""
    if isinstance(value, (tuple, list)):
        return [told(one) for one in value]
    if is_dataclass(value) and not isinstance(value, (type, tokenyard.Handle)):
        return [told(getattr(value, one.name)) for one in fields(value)]
    if isinstance(value, (EventHandle, EventOverlap)):
        return value.is_over
    if isinstance(value, Tensor):
        return value.clone()
    return value if isinstance(value, (int, float, str, torch.dtype, type(None))) else repr(value)


def plain(value: Any) -> Made:
    return value, told


def by_source(buffer: Any, *, later: bool = False, counted: bool = False) -> Made:
    x, topk_idx, weights = routed(buffer.rank)
    routing: dict[str, Any] = {"num_experts": E}
    if counted:
        given = buffer.get_dispatch_layout(topk_idx, E)
        names = "num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert"
        routing = dict(zip((*names, "is_token_in_rank"), given))
    got = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, async_finish=later, **routing)
    if later:
        got.event.current_stream_wait()
    y = got.recv_x.clone()

    def use(one: Any) -> Any:
        handle = getattr(one, "handle", one)
        again = buffer.dispatch(x, handle=handle)
        return told([buffer.combine(y, handle), again.recv_x, handle.recv_src_idx])

    # What a user has given is held by him, too.
    return Given(got, routing.get("is_token_in_rank")) if counted else got, use


class Given:
    """A result, and a tensor that the call was given."""

    def __init__(self, got: Any, layout: Tensor | None) -> None:
        self.handle, self.layout = got.handle, layout


def handle_of(made: Made) -> Made:
    got, use = made
    return got.handle, use


def by_expert(buffer: Any) -> Made:
    got = buffer.dispatch_by_expert(*routed(buffer.rank), num_experts=E)
    y = got.x.clone()
    return got, lambda one: buffer.combine_by_expert(y, getattr(one, "handle", one)).clone()


def gathered(buffer: Any) -> Made:
    x = routed(buffer.rank)[0]
    got = buffer.all_gather(x)
    y = got.x.clone()

    def use(one: Any) -> Any:
        return told([buffer.all_gather(x, one.handle).x, buffer.combine(y, one.handle)])

    return got, use


def through_nn(buffer: Any, *, by_expert: bool = True) -> Made:
    dispatch = functional.dispatch_by_expert if by_expert else functional.dispatch
    combine: Any = functional.combine_by_expert if by_expert else functional.combine
    rows = dispatch(buffer, *routed(buffer.rank), E)
    y = rows.x.clone()
    return rows, lambda one: combine(buffer, y, one).clone()


def elastic(buffer: Any, *, expand: bool = False, sync: bool = True) -> Made:
    x, topk_idx, weights = routed(buffer.rank)
    options: Any = {"num_experts": E, "do_expand": expand}
    got = buffer.dispatch(x, topk_idx, weights, do_cpu_sync=sync, **options)
    y = got.recv_x.clone()

    def use(one: Any) -> Any:
        handle = getattr(one, "handle", one)
        again = buffer.dispatch(x, handle=handle, **options).recv_x
        return told([buffer.combine(y, handle).combined_x, again])

    return got, use


def hybrid(buffer: Any) -> Made:
    x, topk_idx, _ = routed(buffer.rank)
    routing_map = torch.zeros(T, E, dtype=torch.bool).scatter_(1, topk_idx, True)
    probs = routing_map * torch.arange(1.0, E + 1)
    got = buffer.dispatch_with_permute(hidden=x, routing_map=routing_map, probs=probs)
    y, came = got.hidden.clone(), got.probs.clone()

    def use(one: Any) -> Any:
        handle = getattr(one, "handle", one)
        back = buffer.combine_with_unpermute(hidden=y, probs=came, handle=handle)
        again = buffer.dispatch_with_permute(hidden=x, probs=probs, handle=handle)
        only = buffer.combine_with_unpermute(hidden=y, handle=handle)
        return told([back, only, again[:4]])

    return got, use


def low_latency(buffer: Any, *, hook: bool = False) -> Made:
    """With a hook the handle is read before rows have arrived."""
    x, topk_idx, weights = routed(buffer.rank)
    got = buffer.low_latency_dispatch(
        x.bfloat16(), topk_idx, T, E, use_fp8=False, return_recv_hook=hook
    )
    if hook:
        layout_range = got.handle[1]
        got.hook()
        assert (layout_range & 0xFFFFFFFF).sum() == got.recv_count.sum() > 0
    y = got.recv_x.clone()

    def use(one: Any) -> Any:
        handle = getattr(one, "handle", one)
        return buffer.low_latency_combine(y, topk_idx, weights, handle).combined_x.clone()

    return got, use


def low_latency_sums(buffer: Any) -> Made:
    got, _ = low_latency(buffer)
    x, topk_idx, weights = got.recv_x, *routed(buffer.rank)[1:]
    return plain(buffer.low_latency_combine(x, topk_idx, weights, got.handle))


def prepared(buffer: Any, *, by_expert: bool = True) -> Made:
    given = routed(buffer.rank)
    shape: Any = {"max_tokens": T, "hidden": D, "num_topk": K, "num_experts": E}
    step = buffer.prepare(**shape, dtype=torch.float32, by_expert=by_expert)

    def use(one: Any) -> Any:
        rows = one.dispatch(*given)
        return told([rows.x, rows.offsets, rows.topk_idx, one.combine(rows.x * 2)])

    return step, use


def prepared_rows(buffer: Any, *, by_expert: bool = True) -> Made:
    step, _ = prepared(buffer, by_expert=by_expert)

    def use(one: Any) -> Any:
        beside = one.num_tokens_per_expert, one.offsets, one.topk_idx, one.topk_weights
        return told([one.x, *beside])

    return step.dispatch(*routed(buffer.rank)), use


def event(buffer: Any) -> Made:
    x, topk_idx, weights = routed(buffer.rank)
    routing = {"topk_idx": topk_idx, "topk_weights": weights, "num_experts": E}
    over = buffer.dispatch(x, **routing, async_finish=True).event
    return over, lambda one: [one.current_stream_wait(), one.is_over]


def aligned(_: Any) -> Made:
    return plain(tokenyard.moe_align_block_size(torch.tensor([[0, 2]], dtype=torch.int32), 4, 3))


def buffer_itself(buffer: Any) -> Made:
    return buffer, lambda one: one.all_gather(torch.ones(2, 3)).x.clone()


def tensors(value: Any) -> Iterator[Tensor]:
    """All that a user can write to of a value, but the rows' ticket, which is a number."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tokenyard.Handle):
        for name in (*value.v1_fields, "recv_src_idx", "is_token_in_rank"):
            yield from tensors(getattr(value, name))
        for found in (value[place] for place in range(len(value))):
            yield from tensors(found)
        for found in (value.flow.rows_R, value.flow.sent_RR, value.flow.tokens_R):
            assert found is None or found.dtype.kind == "i"
    elif isinstance(value, tokenyard.EPHandle):
        yield value.topk_idx
        yield value.psum_num_recv_tokens_per_expert
        yield value.recv_src_metadata
        yield value.dst_buffer_slot_idx
    elif isinstance(value, Given):
        yield from tensors((value.handle, value.layout))
    elif isinstance(value, (tuple, list, tokenyard.LowLatencyHandle)):
        names = getattr(value, "_fields", range(len(value)))
        for name, one in zip(names, value):
            if name != "ticket":
                yield from tensors(one)
