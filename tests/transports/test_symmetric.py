"""The symmetric transport: Triton's kernels, interpreted, on memory that processes share."""

from __future__ import annotations

import os
import random
import signal
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tests.cases.conformance import check
from tests.cases.exchange import FP8, Case
from tests.cases.exchange import job as exchange
from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tokenyard import spec
from tokenyard.comm import connect
from tokenyard.kernels import load
from tokenyard.kernels.base import interprets_triton
from tokenyard.testing import Exited, Processes, assert_same, numbered_tokens, routing
from tokenyard.topology import Placement
from tokenyard.transports import Offer, RowsOut
from tokenyard.transports.symmetric import SymmetricTransport
from tokenyard.transports.symmetric_memory import (
    SharedSegments,
    SymmetricBlock,
    TorchSymmetricMemory,
)
from tokenyard.types import Flow

pytestmark = [
    pytest.mark.processes,
    pytest.mark.triton,
    pytest.mark.skipif(not interprets_triton(), reason="needs triton and TRITON_INTERPRET=1"),
]

NUM_EXPERTS, NUM_TOPK = 8, 3
CHUNKS = (1, 6)  # tokens of a program
HOW: dict[str, Any] = {"transport": "symmetric", "kernels": "triton"}


def given(seed: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts and weights of one rank: any number of tokens, any kind of routing."""
    pick = random.Random(seed)
    hidden = pick.choice([8, 40, 129])
    dtype = pick.choice([torch.bfloat16, torch.float32])
    kind = pick.choice(["uniform", "skewed", "one", "none", "holes"])
    tokens = [pick.randint(0, 5) for _ in range(rank + 1)][rank]
    topk_idx, weights = routing(kind, tokens, NUM_TOPK, NUM_EXPERTS, seed=100 * seed + rank)
    return numbered_tokens(tokens, hidden, first=10 * rank, dtype=dtype), topk_idx, weights


def go_round(group: Any, seeds: range) -> list[tuple[Tensor, ...]]:
    """Dispatch and combine of each routing, on one Buffer."""
    outs = []
    with tokenyard.Buffer(group, **HOW) as buffer:
        for seed in seeds:
            x, topk_idx, weights = given(seed, group.rank())
            config = tokenyard.Config(num_max_nvl_chunked_send_tokens=CHUNKS[seed % 2])
            got: Any = buffer.dispatch(
                x, topk_idx=topk_idx, topk_weights=weights, num_experts=NUM_EXPERTS, config=config
            )
            sums = buffer.combine(got.recv_x, got.handle, got.recv_topk_weights, config=config)
            outs.append((*got[:3], *sums[:2]))
    return outs


@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_routings", at_night([4, 50], gate=(4,)))
def test_random_routings(num_ranks: int, num_routings: int, processes: Pools) -> None:
    """Both chunk sizes by turns; blocks grow between calls."""
    got = processes(num_ranks, timeout=380).run(go_round, range(num_routings))
    world = spec.World.even(NUM_EXPERTS, num_ranks)
    for seed in range(num_routings):
        xs, topk_idxs, weights = zip(*(given(seed, rank) for rank in range(num_ranks)))
        layouts = [spec.layout(one, world) for one in topk_idxs]
        received = spec.dispatch(xs, layouts, world, topk_idxs=topk_idxs, topk_weights=weights)
        sums = spec.combine([one.x for one in received], layouts, world)
        back = spec.combine([one.topk_weights for one in received], layouts, world)
        for rank, one in enumerate(received):
            want = (one.x, one.topk_idx, one.topk_weights, sums[rank], back[rank])
            assert_same(got[rank][seed], want, f"routing {seed} on rank {rank}")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(num_ranks=2, num_biases=2, worst=True, **HOW), id="biases-worst"),
        pytest.param(Case(num_ranks=3, dtype=FP8, num_sms=6, **HOW), id="fp8"),
        pytest.param(Case(num_ranks=4, ranks_per_node=2, num_biases=1, **HOW), id="two-nodes"),
    ],
)
def test_conformance(case: Case, processes: Pools) -> None:
    check(case, processes(case.num_ranks).run(exchange, case))


def until_a_peer_dies(group: Any, victim: int) -> tuple[str, tuple[int, ...], float]:
    x, topk_idx, weights = given(3, 0)
    options: dict[str, Any] = {
        "topk_idx": topk_idx,
        "topk_weights": weights,
        "num_experts": NUM_EXPERTS,
    }
    start = time.time()
    try:
        with tokenyard.Buffer(group, timeout=scaled(60), **HOW) as buffer:
            for turn in range(1000):
                if turn == 2 and group.rank() == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
                start = time.time()
                got: Any = buffer.dispatch(x, **options)
                buffer.combine(got.recv_x, got.handle)
    except tokenyard.PeerError as error:
        return type(error).__name__, error.ranks, time.time() - start
    raise AssertionError("nobody noticed")


@pytest.mark.faults
def test_a_killed_peer_raises() -> None:
    with Processes(3, timeout=scaled(120)) as ranks:
        got = ranks.run(until_a_peer_dies, 1, may_die=True)
    assert got[1] == Exited(-signal.SIGKILL)
    for kind, dead, seconds in (got[0], got[2]):
        assert (kind, dead) == ("PeerDied", (1,))
        assert seconds < scaled(20)


def dies_between_put_and_flag(group: Any, victim: int) -> tuple[str, tuple[int, ...]]:
    """The others are in the middle of their moves, and wait for its flags in shared memory."""
    from tokenyard.kernels import triton

    x, topk_idx, weights = given(3, 0)
    if group.rank() == victim:
        triton.raise_flags = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        with tokenyard.Buffer(group, timeout=scaled(60), **HOW) as buffer:
            buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=NUM_EXPERTS)
    except tokenyard.PeerError as error:
        return type(error).__name__, error.ranks
    raise AssertionError("nobody noticed")


@pytest.mark.faults
def test_a_peer_that_dies_before_its_flag_raises() -> None:
    with Processes(2, timeout=scaled(120)) as ranks:
        got = ranks.run(dies_between_put_and_flag, 1, may_die=True)
    assert got[0] == ("PeerDied", (1,))


class StandIn:
    """torch.distributed._symmetric_memory, on segments that processes share."""

    def __init__(self, shared: SharedSegments) -> None:
        self.shared = shared
        self.made: list[SymmetricBlock] = []

    def empty(self, num_bytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert dtype == torch.uint8
        self.made.append(self.shared.make(num_bytes, "test"))
        return self.made[-1].own

    def rendezvous(self, own: Tensor, group: Any) -> Any:
        assert own.data_ptr() == self.made[-1].own.data_ptr()
        torch.distributed.barrier(group)
        return SimpleNamespace(buffer_ptrs=list(self.made[-1].addresses))


def over_torch_symmetric_memory(group: Any, silent: int) -> tuple[Any, ...]:
    """The other provider, which looks once and for long; then a rank that stays away."""
    communicator = connect(group, 20.0)
    shared = SharedSegments(communicator, 20.0)
    peers = TorchSymmetricMemory(group, torch.device("cpu"), 20.0)
    peers._symmetric = StandIn(shared)  # type: ignore[assignment]
    kernels: Any = load("triton")
    transport = SymmetricTransport(communicator, peers, kernels, [0] * group.size())
    x, topk_idx, _ = given(4, group.rank())
    ranks = Placement.even(NUM_EXPERTS, group.size()).rank_of_expert
    route = kernels.route(kernels.layout(topk_idx, ranks, group.size(), None)[0].is_token_in_rank)
    sent = np.array([route.send_counts] * group.size())
    told = transport.exchange(sent.T.copy(), "test")
    sent_RR = transport.exchange(np.array([route.send_counts] * group.size()), "test")
    flow = Flow(
        route, tuple(told[:, 0].tolist()), int(told[:, 0].sum()), sent_RR[:, 0], None, sent_RR
    )
    rows = RowsOut([x], flow, Offer(), told, tokenyard.Config(), "test")
    (out,), move = transport.send(rows)
    move()
    missing = None
    if group.rank() != silent:
        peers._timeout = 2e-5  # some looks
        transport.send(rows)[1]()
        with pytest.raises(tokenyard.PeerTimeout) as caught:
            peers.check("dispatch")
        missing = caught.value.ranks
    torch.distributed.barrier(group)
    transport.close()
    shared.close()
    return out, missing


def test_blocks_of_torch(processes: Pools) -> None:
    """All of it but the device: no GPU is here, and this memory is the CPU's."""
    got = processes(2).run(over_torch_symmetric_memory, 1)
    world = spec.World.even(NUM_EXPERTS, 2)
    xs, topk_idxs, _ = zip(*(given(4, rank) for rank in range(2)))
    want = spec.dispatch(xs, [spec.layout(one, world) for one in topk_idxs], world)
    assert_same([one[0] for one in got], [one.x for one in want])
    assert [one[1] for one in got] == [(1,), None]


def test_other_kernels_have_no_put(processes: Pools) -> None:
    (message,) = processes(1).run(refused)
    assert message == (
        "transport 'symmetric' cannot be used: the kernel set has no put (take triton)"
    )


def refused(group: Any) -> str:
    with pytest.raises(ValueError) as caught:
        tokenyard.Buffer(group, transport="symmetric", kernels="reference")
    return str(caught.value)
