"""What users do with a Buffer before they close it: each gives the Buffer, and what they still hold
afterwards, of which no tensor lies in memory that ranks share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tokenyard.nn import MoE, RouterConfig

HIDDEN, EXPERTS, TOPK = 256, 8, 2
Used = tuple[Any, Any]


def tokens(num_tokens: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = torch.rand(num_tokens, EXPERTS).topk(TOPK)
    return torch.randn(num_tokens, HIDDEN).bfloat16(), ids.contiguous(), weights.contiguous()


def opened(group: Any, **options: Any) -> tokenyard.Buffer:
    return tokenyard.Buffer(group, **options)


def ended(buffer: Any) -> Any:
    buffer.all_gather(torch.zeros(1))  # all ranks have read what this one offered
    return buffer


def calls(group: Any, **options: Any) -> Used:
    buffer, (x, ids, weights) = opened(group, **options), tokens()
    got: Any = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_experts=EXPERTS)
    back = buffer.combine(got.recv_x, got.handle)
    rows: Any = buffer.dispatch_by_expert(x, ids, weights, num_experts=EXPERTS)
    buffer.combine_by_expert(rows.x, rows.handle)
    gathered = buffer.all_gather(torch.zeros(1))
    return ended(buffer), (got.handle, got.event, back.event, rows.handle, gathered.handle)


def asynchronous(group: Any, **options: Any) -> Used:
    buffer, (x, ids, weights) = opened(group, **options), tokens()
    routing: dict[str, Any] = {"topk_idx": ids, "topk_weights": weights, "num_experts": EXPERTS}
    got: Any = buffer.dispatch(x, **routing, async_finish=True)
    back = buffer.combine(got.recv_x, got.handle, previous_event=got.event, async_finish=True)
    back.event.current_stream_wait()
    return ended(buffer), (got.handle, got.event, back.event)


def prepared(group: Any, **options: Any) -> Used:
    buffer, held = opened(group, **options), []
    for by_expert in (True, False):
        step = buffer.prepare(
            max_tokens=40, hidden=HIDDEN, num_topk=TOPK, num_experts=EXPERTS, by_expert=by_expert
        )
        for _ in range(3):
            step.combine(step.dispatch(*tokens()).x)
        held.append(step)
    return ended(buffer), held


def layers(group: Any, **options: Any) -> Used:
    """A model, with few tokens and many, evaluated and trained."""
    buffer = opened(group, **options)
    model = MoE(buffer, HIDDEN, 32, RouterConfig(num_experts=EXPERTS, num_topk=TOPK))
    for num_tokens in (4, 200):
        with torch.no_grad():
            model(torch.randn(num_tokens, HIDDEN))
        model(torch.randn(num_tokens, HIDDEN)).sum().backward()
    return ended(buffer), model


def low_latency(group: Any, **options: Any) -> Used:
    buffer, held = opened(group, low_latency_mode=True, **options), list[Any]()
    x, ids, weights = tokens()
    ways: list[dict[str, Any]] = [{}, {"async_finish": True}, {"return_recv_hook": True}]
    for how in ways:
        got: Any = buffer.low_latency_dispatch(x, ids, len(x), EXPERTS, use_fp8=False, **how)
        _received(got)
        back = buffer.low_latency_combine(got.recv_x, ids, weights, got.handle, **how)
        _received(back)
        held += [got.handle, got.event, got.hook, back.event, back.hook]
    return ended(buffer), held


def _received(got: Any) -> None:
    if got.hook is not None:
        got.hook()
    elif got.event.event is not None:
        got.event.current_stream_wait()


def elastic(group: Any, **options: Any) -> Used:
    buffer, held = tokenyard.ElasticBuffer(group, **options), list[Any]()
    x, ids, weights = tokens()
    for expand in (False, True):
        got: Any = buffer.dispatch(
            x, ids, weights, num_experts=EXPERTS, num_max_tokens_per_rank=len(x), do_expand=expand
        )
        held += [got.handle, buffer.combine(got.recv_x, got.handle).event]
    buffer.engram_write(torch.randn(10, HIDDEN))
    held.append(buffer.engram_fetch(torch.tensor([[1]])))
    buffer.agrs_set_config(1 << 16, 4)
    with buffer.agrs_new_session():
        gathered, wait = buffer.all_gather(torch.ones(5))
        wait()
    buffer.pp_set_config(1 << 12, 2)
    buffer.barrier()
    del gathered
    return buffer, [*held, wait]


def hybrid(group: Any, **options: Any) -> Used:
    buffer = tokenyard.HybridEPBuffer(group, HIDDEN, 40, EXPERTS // group.size(), **options)
    x, ids, weights = tokens()
    got = buffer.dispatch_with_permute(
        hidden=x, topk_idx=ids, topk_weights=weights, num_of_experts=EXPERTS
    )
    buffer.combine_with_unpermute(hidden=got[0], handle=got[-1])
    ended(buffer._buffer)
    return buffer, got[-1]


USES: dict[str, Callable[..., Used]] = {
    one.__name__: one
    for one in (calls, asynchronous, prepared, layers, low_latency, elastic, hybrid)
}
BALANCED = ("calls", "asynchronous", "prepared", "layers")  # uses that take a balance
