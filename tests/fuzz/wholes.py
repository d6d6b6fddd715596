"""Buffers of other interfaces beside those of a program, each from its opening to its end."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from tests.cases import elastic, hybrid_ep, replicas
from tests.cases.exchange import FP8, Case
from tests.fuzz.steps import Whole

KINDS: dict[str, ModuleType] = {"elastic": elastic, "hybrid": hybrid_ep, "replicas": replicas}
_DTYPES = (torch.bfloat16, torch.float32, torch.float16, FP8)


def draw(rng: random.Random, num_ranks: int, doubled: bool) -> tuple[str, Any]:
    kind, dtype = rng.choice(list(KINDS)), rng.choice(_DTYPES)
    routings = ["uniform", "skewed", "holes", "one", *["doubled"] * doubled]
    transport = rng.choice(["direct", "collective", "ring"])
    if kind == "elastic":
        exchange = Case(
            num_ranks=num_ranks,
            tokens=tuple(rng.randint(0, 12) for _ in range(num_ranks)),
            hidden=128,
            num_topk=rng.randint(1, 4),
            num_experts=num_ranks * rng.randint(1, 4) if num_ranks > 3 else 4 * num_ranks,
            dtype=dtype,
            kind=rng.choice(routings),
            transport=transport,
            num_biases=rng.choice([0, 2]),
            expert_alignment=rng.choice([1, 4]),
        )
        exchange = replace(exchange, num_topk=min(exchange.num_topk, exchange.num_experts))
        flags = {"do_expand": rng.random() < 0.5, "do_cpu_sync": rng.random() < 0.5}
        return kind, elastic.ElasticCase(exchange=exchange, **flags)
    if kind == "hybrid":
        return kind, hybrid_ep.Case(
            num_ranks=num_ranks,
            tokens=tuple(rng.randint(0, 12) for _ in range(num_ranks)),
            kind=rng.choice(routings),
            dtype=dtype,
            pad_multiple=rng.choice([None, 4]),
            with_probs=rng.random() < 0.5,
            as_lists=rng.random() < 0.5,
            transport=transport,
        )
    return kind, replicas.Case(
        num_ranks=num_ranks,
        transport=transport,
        dtype=dtype,
        kind=rng.choice(routings),
        compiled=rng.random() < 0.7,
    )


def run(group: Any, step: Whole) -> bytes:
    """What this rank has of it. Plain pickle does not know all dtypes."""
    more = () if step.kind != "hybrid" else ([len(one.x) for one in step.case.expected_rows()],)
    file = io.BytesIO()
    torch.save(KINDS[step.kind].job(group, step.case, *more), file)
    return file.getvalue()


def problems(step: Whole, outs: list[bytes]) -> list[str]:
    loaded = [torch.load(io.BytesIO(one), weights_only=False) for one in outs]
    try:
        KINDS[step.kind].check(step.case, loaded)
    except AssertionError as error:
        return [str(error)]
    return []
