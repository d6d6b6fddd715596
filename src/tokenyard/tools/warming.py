"""Compile kernels ahead of time: for images, for CI, and before a service takes requests.

Kernels are compiled when a call first needs them, and kept on disk. `warm_up` makes such calls, of
every kind that is asked for, on two virtual ranks of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenyard import Buffer, validate
from tokenyard.ops.align import moe_align_block_size
from tokenyard.ops.permute import permute, unpermute
from tokenyard.ops.quantize import per_token_cast_back, per_token_cast_to_fp8
from tokenyard.ops.rearrange import rearrange
from tokenyard.testing.virtual import run_virtual

_EXPERTS, _TOPK, _HIDDEN = 4, 2, 512
_LIMIT = 900.0  # seconds for all of it, on a slow machine


def warm_up(
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,), kinds: Sequence[str] | None = None
) -> None:
    """Compile the kernels of calls with rows of these dtypes, and keep them on disk.

    Kinds of calls are those of `KINDS`, by default all. Nothing is compiled that is on disk
    already: a second time this takes a second or two.
    """
    for dtype in dtypes:
        validate.require(
            dtype in validate.SUMMABLE, f"dtype is {dtype}, want one that combine can sum"
        )
    for kind in kinds or ():
        validate.require(kind in KINDS, f"kind is {kind!r}, want one of {', '.join(KINDS)}")
    for kind in kinds or KINDS:
        for dtype in dtypes:
            run_virtual(KINDS[kind], 2, dtype, timeout=_LIMIT)


def _tokens(dtype: torch.dtype, num_tokens: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """x, topk_idx and topk_weights."""
    x = torch.ones(num_tokens, _HIDDEN, dtype=torch.float32, device="cpu").to(dtype)
    topk_idx = torch.arange(num_tokens * _TOPK, device="cpu").view(num_tokens, _TOPK) % _EXPERTS
    return x, topk_idx, torch.ones(num_tokens, _TOPK, dtype=torch.float32, device="cpu")


def _exchange(buffer: Buffer, dtype: torch.dtype) -> None:
    """There and back: plainly, and with all that a call may be given."""
    x, topk_idx, weights = _tokens(dtype)
    given: Any = {"topk_idx": topk_idx, "topk_weights": weights, "num_experts": _EXPERTS}
    got: Any = buffer.dispatch(x, **given)
    buffer.combine(got.recv_x, got.handle)
    buffer.combine(got.recv_x.clone(), got.handle)
    got = buffer.dispatch(x, **given, num_worst_tokens=16, expert_alignment=8)
    back: Any = buffer.dispatch(x, handle=got.handle)
    buffer.combine(back.recv_x, got.handle, got.recv_topk_weights, bias=x)
    buffer.dispatch(per_token_cast_to_fp8(x.bfloat16()), **given)


def _direct(group: Any, dtype: torch.dtype) -> None:
    with Buffer(group, transport="direct") as buffer:
        _exchange(buffer, dtype)


def _ring(group: Any, dtype: torch.dtype) -> None:
    with Buffer(group, transport="ring") as buffer:
        _exchange(buffer, dtype)


def _collective(group: Any, dtype: torch.dtype) -> None:
    with Buffer(group, transport="collective") as buffer:
        _exchange(buffer, dtype)


def _nodes(group: Any, dtype: torch.dtype) -> None:
    with Buffer(group, transport="hierarchical", ranks_per_node=1) as buffer:
        _exchange(buffer, dtype)


def _by_expert(group: Any, dtype: torch.dtype) -> None:
    with Buffer(group, transport="direct") as buffer:
        for num_tokens in (4, 8192, 8192):  # the last in one step
            x, topk_idx, weights = _tokens(dtype, num_tokens)
            got = buffer.dispatch_by_expert(x, topk_idx, weights, num_experts=_EXPERTS)
            assert isinstance(got.x, Tensor)
            buffer.combine_by_expert(got.x, got.handle)
            buffer.combine_by_expert(got.x, got.handle, weigh=False)


def _low_latency(group: Any, dtype: torch.dtype) -> None:
    x, topk_idx, weights = _tokens(dtype)
    with Buffer(group, transport="direct", low_latency_mode=True) as buffer:
        casts: list[dict[str, Any]] = [{"use_fp8": False}]
        if dtype == torch.bfloat16:
            casts += [{}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True}]
        for fp8 in casts:
            got: Any = buffer.low_latency_dispatch(x, topk_idx, 4, _EXPERTS, **fp8)
            y = buffer.get_next_low_latency_combine_buffer(got.handle)
            y.zero_()
            for zero_copy in (False, True):
                buffer.low_latency_combine(y, topk_idx, weights, got.handle, zero_copy=zero_copy)
            del got, y


def _local(group: Any, dtype: torch.dtype) -> None:
    if group.rank() == 0:
        x, topk_idx, weights = _tokens(dtype)
        rows = permute(x, topk_idx, _EXPERTS, expert_alignment=4)
        unpermute(rows.x, rows.row_of, weights=weights)
        moe_align_block_size(topk_idx, 4, _EXPERTS)
        rearrange(x.new_empty(_HIDDEN, x.shape[0]).T, x)
        per_token_cast_back(*per_token_cast_to_fp8(x.bfloat16()))


# What warm_up compiles kernels for.
KINDS: dict[str, Callable[[Any, torch.dtype], None]] = {
    "direct": _direct,
    "ring": _ring,
    "collective": _collective,
    "nodes": _nodes,
    "by_expert": _by_expert,
    "low_latency": _low_latency,
    "local": _local,
}
