"""Virtual ranks are threads: what programs that keep a Buffer in a module's global are told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.clock import scaled
from tokenyard import Buffer, BufferInUse, ElasticBuffer, HybridEPBuffer
from tokenyard.testing import assert_same, numbered_tokens, routing, run_virtual

EXPERTS, HIDDEN, TOKENS, TOPK = 8, 128, 4, 2

Make = Callable[[Any], Any]
Call = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # of a Buffer, with one rank's tokens


def by_source(buffer: Any, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    """Also ElasticBuffer's."""
    more = {"topk_idx": topk_idx, "topk_weights": topk_weights, "num_experts": EXPERTS}
    return buffer.dispatch(x, **more)[0].clone()


def low_latency(buffer: Any, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    got = buffer.low_latency_dispatch(x, topk_idx, TOKENS, EXPERTS, use_fp8=False)
    return buffer.low_latency_combine(got[0], topk_idx, topk_weights, got[2])[0].clone()


def hybrid_ep(buffer: Any, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    return buffer.dispatch_with_permute(
        hidden=x, topk_idx=topk_idx, topk_weights=topk_weights, num_of_experts=EXPERTS
    )[0].clone()


def prepared(exchange: Any, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    return exchange.combine(exchange.dispatch(x, topk_idx, topk_weights).x).clone()


def make_prepared(group: Any) -> Any:
    buffer = Buffer(group)
    return buffer.prepare(max_tokens=TOKENS, hidden=HIDDEN, num_topk=TOPK, num_experts=EXPERTS)


KINDS: dict[str, tuple[Make, Call]] = {
    "Buffer": (Buffer, by_source),
    "ElasticBuffer": (lambda group: ElasticBuffer(group, 1 << 20), by_source),
    "HybridEPBuffer": (
        lambda group: HybridEPBuffer(group, HIDDEN, TOKENS, EXPERTS // 2),
        hybrid_ep,
    ),
    "low latency": (lambda group: Buffer(group, low_latency_mode=True), low_latency),
    "prepared": (make_prepared, prepared),
}


@pytest.mark.parametrize("kind", KINDS)
def test_another_ranks_buffer_raises_at_once(kind: str) -> None:
    """And goes on for its own rank, in threads that this one starts too."""
    make, call = KINDS[kind]
    buffers: list[Any] = [None, None]
    meet = threading.Barrier(2, timeout=scaled(20)).wait

    def job(group: Any) -> None:
        rank = group.rank()
        x = numbered_tokens(TOKENS, HIDDEN, first=TOKENS * rank, dtype=torch.bfloat16)
        inputs = x, *routing("uniform", TOKENS, TOPK, EXPERTS, seed=rank)
        buffers[rank] = own = make(group)
        want = call(own, *inputs)
        meet()
        other = buffers[1 - rank]
        uses = [lambda: call(other, *inputs)]
        if kind != "prepared":
            uses += [other.destroy, lambda: other.group]
        for use in uses:
            with pytest.raises(BufferInUse) as raised:
                use()
            said = str(raised.value)
            assert f"that of virtual rank {1 - rank} of 2, and virtual rank {rank}'s" in said
            assert "want each rank to keep its Buffer in a threading.local, or run_proc" in said
        got: list[Tensor] = []
        worker = threading.Thread(target=lambda: got.append(call(own, *inputs)))
        worker.start()
        worker.join(scaled(20))
        assert_same(got, [want])
        meet()

    run_virtual(job, 2)


_buffer: Any = None


@pytest.mark.parametrize("kind", ["Buffer", "ElasticBuffer"])
def test_deepeps_idiom_is_told_to_keep_a_buffer_for_each_rank(kind: str) -> None:
    """get_buffer as in the README of V1 and of V2."""
    make, call = KINDS[kind]

    def get_buffer(group: Any) -> Any:
        global _buffer
        if _buffer is None or _buffer.group != group:
            _buffer = make(group)
        return _buffer

    def job(group: Any) -> None:
        rank = group.rank()
        x = numbered_tokens(TOKENS, HIDDEN, first=TOKENS * rank, dtype=torch.bfloat16)
        for seed in range(3):
            inputs = routing("uniform", TOKENS, TOPK, EXPERTS, seed=seed)
            call(get_buffer(group), x, *inputs)

    with pytest.raises(BufferInUse, match="virtual ranks are threads, which share a module's"):
        run_virtual(job, 4, timeout=scaled(20))


def test_a_late_virtual_rank_shows_where_it_stands() -> None:
    over = threading.Event()

    def stand_here(group: Any) -> None:
        if group.rank() > 0:
            over.wait(scaled(60))

    with pytest.raises(TimeoutError) as raised:
        run_virtual(stand_here, 3, timeout=scaled(0.2))
    over.set()
    head, _, stacks = str(raised.value).partition("\n")
    assert head == f"virtual ranks 1, 2 did not end within {scaled(0.2):g} s"
    of_first, _, of_second = stacks.partition("rank 2:\n")
    assert of_first.startswith("rank 1:\n")
    for stack in of_first, of_second:
        assert "in stand_here\n    over.wait(scaled(60))" in stack
