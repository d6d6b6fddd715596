"""Every launcher with every dtype that it knows: what is compiled ahead of time.

Sizes are those of a real model, so that the compiler sees the alignment that it would see there.
Nothing is computed: the tensors hold zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from tokenyard.kernels import triton as kernels
from tokenyard.types import ROW_DTYPES, Route, UnpermuteGrads

TOKENS, TOPK, HIDDEN, EXPERTS, RANKS = 256, 8, 7168, 64, 8
NODES = [0, 1] * (RANKS // 2)

SUMMED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TURNED = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
SCALES = ("plain", "rounded", "packed")

Case = tuple[str, Callable[[], object]]


def cases() -> Iterator[Case]:
    yield from _counting()
    yield from _moving()
    yield from _summing()
    yield from _casting()
    yield from _sharing()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _counting() -> Iterator[Case]:
    ids = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    weights = torch.zeros(TOKENS, TOPK)
    owners = torch.zeros(EXPERTS, dtype=torch.int32)
    yield "layout", partial(kernels.layout, ids, owners, RANKS, None)
    yield "layout nodes", partial(kernels.layout, ids, owners, RANKS, NODES)
    yield "route", partial(kernels.route, torch.zeros(TOKENS, RANKS, dtype=torch.bool))
    yield "localise", partial(kernels.localise, ids, weights, owners.long())
    yield "localise alone", partial(kernels.localise, ids, None, owners.long())
    for dtype in (torch.int32, torch.int64):
        some = ids.to(dtype)
        yield f"align {_name(dtype)}", partial(kernels.align, some, 64, EXPERTS, 4096)
        yield f"place {_name(dtype)}", partial(kernels.place, some, EXPERTS, 8)
    yield "place many experts", partial(kernels.place, ids, 1 << 20, 8)


def _moving() -> Iterator[Case]:
    """Kernels that know no dtype: rows differ in their granules alone."""
    index = torch.zeros(TOKENS, dtype=torch.int32)
    places = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    for dtype in ROW_DTYPES:
        name = _name(dtype)
        x = torch.zeros(TOKENS, HIDDEN, dtype=dtype).view(torch.uint8)
        out = torch.zeros_like(x)
        yield f"pack {name}", partial(kernels.pack, x, index, out)
        yield f"unpack {name}", partial(kernels.pack, x, None, out)
        yield f"spread {name}", partial(kernels.spread, x, places, out)
        parts = x.view(TOKENS, -1, 256).transpose(0, 1)
        yield f"copy {name}", partial(kernels.rearrange, torch.zeros(parts.shape).byte(), parts)
    for width in (1, 2, 4, 8):
        x = torch.zeros(TOKENS, 3 * width, dtype=torch.uint8)
        yield f"pack {width} bytes", partial(kernels.pack, x, index, torch.zeros_like(x))
    for dtype in TURNED:
        square = torch.zeros(1024, 1024, dtype=dtype)
        turned = partial(kernels.rearrange, torch.zeros_like(square), square.t())
        yield f"rearrange {_name(dtype)}", turned
    shared = torch.zeros(64, dtype=torch.float32).as_strided((8, 8), (4, 1))
    yield "rearrange in order", partial(kernels.rearrange, shared, torch.zeros(8, 8))


def _summing() -> Iterator[Case]:
    some = torch.zeros(TOKENS + 1, dtype=torch.int32)
    route = Route(some, (0,) * RANKS, some, some, some)
    places = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    for dtype in SUMMED:
        name, x = _name(dtype), torch.zeros(TOKENS, HIDDEN, dtype=dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        weights = torch.zeros(TOKENS, TOPK, dtype=wide)
        out = torch.zeros_like(x)
        yield f"reduce {name}", partial(kernels.reduce, x, route, [0] * RANKS, [], out)
        both = partial(kernels.reduce, x, route, NODES, [x, x], out)
        yield f"reduce {name} biases nodes", both
        yield f"unpermute {name}", partial(kernels.unpermute, x, places, None, out)
        yield f"unpermute {name} weighted", partial(kernels.unpermute, x, places, weights, out)
        grads = UnpermuteGrads(out, torch.zeros_like(weights))
        yield f"gradients {name}", partial(kernels.unpermute_backward, x, x, places, weights, grads)


def _casting() -> Iterator[Case]:
    x = torch.zeros(TOKENS, HIDDEN)
    for dtype in SUMMED[1:]:
        for number, scales in enumerate(SCALES):
            cast = kernels.plan_to_fp8(TOKENS, HIDDEN, dtype, number > 0, number > 1)
            yield f"to_fp8 {_name(dtype)} {scales}", partial(cast, x.to(dtype))
    fp8 = x.to(torch.float8_e4m3fn)
    for packed in (False, True):
        scales_NS: Tensor = torch.zeros(TOKENS, HIDDEN // 128)
        if packed:
            scales_NS = torch.zeros(TOKENS, HIDDEN // 512, dtype=torch.int32)
        back = kernels.plan_from_fp8(TOKENS, HIDDEN, packed)
        yield f"from_fp8 {SCALES[2 * packed]}", partial(back, fp8, scales_NS)


def _sharing() -> Iterator[Case]:
    some = torch.zeros(TOKENS + 1, dtype=torch.int32)
    route = Route(some, (0,) * RANKS, some, some, some)
    flags = [64 * rank for rank in range(RANKS)]
    for dtype in ROW_DTYPES:
        x = torch.zeros(TOKENS, HIDDEN, dtype=dtype).view(torch.uint8)
        yield f"put {_name(dtype)}", partial(kernels.put, x, route, flags, 6)
    yield "raise", partial(kernels.raise_flags, flags, 7, some.device)
    yield "await", partial(kernels.await_flags, flags, 7, some[:1], 0, 1 << 20)
