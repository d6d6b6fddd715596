"""tokenyard.rearrange beside Tensor.copy_ and beside a plain copy of the same bytes, one thread."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

import tokenyard
from tokenyard.tools.bench.case import Case, Check, Way
from tokenyard.tools.bench.shape import Shape

COPY = "copy_"
CASES = [
    ((8192, 4096), (1, 0)),
    ((8191, 4093), (1, 0)),
    ((100, 256, 512), (2, 1, 0)),
    ((64, 512, 8, 128), (0, 2, 1, 3)),
    ((64, 8, 512, 128), (0, 1, 3, 2)),
    ((32, 32, 32, 32, 32), (4, 3, 2, 1, 0)),
    ((16, 3, 512, 512), (0, 2, 3, 1)),
    ((16, 512, 512, 3), (0, 3, 1, 2)),
    ((7, 9, 11, 13, 17, 19), (5, 1, 3, 0, 2, 4)),
    ((4096, 64, 128), (1, 0, 2)),
]


def rearrange(group: Any, shape: Shape, tokens: int) -> Generator[Case]:
    dtype = getattr(torch, shape.dtype)
    for sizes, axes in CASES[: shape.cases]:
        yield _case(sizes, axes, dtype)


def _case(sizes: tuple[int, ...], axes: tuple[int, ...], dtype: torch.dtype) -> Case:
    source = torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(dtype)
    view = source.permute(axes)
    ours, theirs = (torch.empty(view.shape, dtype=view.dtype) for _ in range(2))
    plain = torch.empty_like(source)

    def checks() -> list[Check]:
        tokenyard.rearrange(ours, view)
        return [("rearranged", ours, view.contiguous())]

    return Case(
        label=f"{'x'.join(map(str, sizes))} to {'x'.join(map(str, view.shape))}",
        ours={"rearrange": Way(lambda: tokenyard.rearrange(ours, view))},
        beside={
            COPY: Way(lambda: theirs.copy_(view)),
            "plain copy": Way(lambda: plain.copy_(source)),
        },
        checks=checks,
        base=COPY,
        num_bytes=source.nbytes,
    )
