"""One case of an ElasticBuffer: what a rank does with its inputs, and what `spec` says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tests.cases.exchange import FP8, Case, Inputs, inputs
from tokenyard import spec
from tokenyard.testing import assert_same

NUM_MAX = 16  # num_max_tokens_per_rank
FIELDS = (
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "num_recv_tokens_per_expert_list",
)


@dataclass(frozen=True, kw_only=True)
class ElasticCase:
    exchange: Case
    do_expand: bool = False
    do_cpu_sync: bool = True
    allow_hybrid_mode: bool = True
    allow_multiple_reduction: bool = True

    @property
    def num_scaleup_ranks(self) -> int:
        size, per_node = self.exchange.num_ranks, self.exchange.ranks_per_node
        if self.allow_hybrid_mode and isinstance(per_node, int) and size % per_node == 0:
            return per_node
        return size


def results(rows: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """What experts make of rows in these tests: numbers whose sums depend on their order."""
    generator = torch.Generator().manual_seed(rank)
    wide = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    return (wide * 10 ** torch.randint(-2, 3, rows.shape, generator=generator)).to(dtype)


def job(group: Any, case: ElasticCase) -> dict[str, Any]:
    """Two dispatches in flight, combines of both, and dispatches along their handles."""
    rank, exchange = group.rank(), case.exchange
    with tokenyard.ElasticBuffer(
        group,
        num_max_tokens_per_rank=NUM_MAX,
        allow_hybrid_mode=case.allow_hybrid_mode,
        allow_multiple_reduction=case.allow_multiple_reduction,
        transport=exchange.transport,
        kernels=exchange.kernels,
        ranks_per_node=exchange.ranks_per_node,
    ) as buffer:
        out: dict[str, Any] = {}
        given = [inputs(exchange, rank, turn) for turn in range(2)]
        got = [_dispatch(buffer, case, one) for one in given]
        for turn in (1, 0):
            named: dict[str, Any] = {"topk_idx": got[turn].recv_topk_idx}
            named |= _parts(got[turn], exchange)
            named |= {name: getattr(got[turn].handle, name) for name in FIELDS}
            y = results(named["x"], rank, exchange.sum_dtype)
            weights, biases = got[turn].recv_topk_weights, _pair_of(given[turn].biases)
            both = buffer.combine(y, got[turn].handle, weights, biases)
            named |= {"sums": both.combined_x, "weights back": both.combined_topk_weights}
            named["plain sums"] = buffer.combine(y, got[turn].handle).combined_x
            again = buffer.dispatch(
                _rows(given[turn]),
                topk_weights=given[turn].topk_weights,
                handle=got[turn].handle,
                do_expand=case.do_expand,
            )
            assert again.handle is got[turn].handle
            cached = {"topk_idx": again.recv_topk_idx} | _parts(again, exchange)
            named |= {f"cached {name}": value for name, value in cached.items()}
            out |= {f"{turn} {name}": value for name, value in named.items()}
        buffer.barrier()
        return out


def _dispatch(buffer: tokenyard.ElasticBuffer, case: ElasticCase, given: Inputs) -> Any:
    return buffer.dispatch(
        _rows(given),
        given.topk_idx,
        given.topk_weights,
        num_experts=case.exchange.num_experts,
        expert_alignment=case.exchange.expert_alignment,
        do_expand=case.do_expand,
        do_cpu_sync=case.do_cpu_sync,
    )


def _pair_of(biases: list[Tensor]) -> Any:
    return tuple(biases) if biases else None


def _rows(given: Inputs) -> Any:
    return given.x if given.scales is None else (given.x, given.scales)


def _parts(got: Any, case: Case) -> dict[str, Any]:
    x, scales = got.recv_x if case.dtype == FP8 else (got.recv_x, None)
    return {"x": x, "scales": scales, "topk_weights": got.recv_topk_weights}


@lru_cache(maxsize=4)
def _expected(case: ElasticCase) -> list[dict[str, Any]]:
    exchange = case.exchange
    world, ranks = exchange.world, range(exchange.num_ranks)
    outs: list[dict[str, Any]] = [{} for _ in ranks]
    for turn in range(2):
        given = [inputs(exchange, rank, turn) for rank in ranks]
        topk_idxs = [one.topk_idx for one in given]
        received = spec.elastic_dispatch(
            [one.x for one in given],
            topk_idxs,
            world,
            topk_weights=[one.topk_weights for one in given],
            scales=[one.scales for one in given if one.scales is not None] or None,
            num_max_tokens_per_rank=NUM_MAX,
            num_scaleup_ranks=case.num_scaleup_ranks,
            expert_alignment=exchange.expert_alignment,
            do_expand=case.do_expand,
            do_cpu_sync=case.do_cpu_sync,
        )
        ys = [results(one.x, rank, exchange.sum_dtype) for rank, one in enumerate(received)]
        how: Any = {
            "num_max_tokens_per_rank": NUM_MAX,
            "do_expand": case.do_expand,
            "by_node": case.num_scaleup_ranks < exchange.num_ranks,
            "allow_multiple_reduction": case.allow_multiple_reduction,
        }
        plain = spec.elastic_combine(ys, received, topk_idxs, world, **how)
        how["topk_weights"] = [one.topk_weights for one in received]
        biases = [one.biases for one in given]
        summed = spec.elastic_combine(ys, received, topk_idxs, world, biases=biases, **how)
        for rank, one in enumerate(received):
            names = ("x", "scales", "topk_weights", "topk_idx")
            parts = {name: getattr(one, name) for name in names}
            named = parts | {f"cached {name}": value for name, value in parts.items()}
            named |= {name: getattr(one, name) for name in FIELDS}
            named["plain sums"], _ = plain[rank]
            named["sums"], named["weights back"] = summed[rank]
            outs[rank] |= {f"{turn} {name}": value for name, value in named.items()}
    return outs


def check(case: ElasticCase, outs: list[dict[str, Any]]) -> None:
    """The same for all transports and kernel sets."""
    plain = replace(case.exchange, transport=Case.transport, kernels=Case.kernels)
    wanted = _expected(replace(case, exchange=plain))
    for rank, (got, want) in enumerate(zip(outs, wanted, strict=True)):
        assert got.keys() == want.keys()
        for name in want:
            assert_same(got[name], want[name], f"rank {rank}: {name}")
