"""Rows to FP8 and back, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenyard.wire.fp8 import FP8_MAX, GROUP, PER_WORD


def plan_to_fp8(
    num_rows: int, hidden: int, dtype: torch.dtype, round_scale: bool, use_ue8m0: bool
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """
    >>> cast = plan_to_fp8(1, 128, torch.float32, False, False)
    >>> values, scales = cast(torch.tensor([[7.0, 3.5, -1.0] + [0.0] * 125]))
    >>> values[0, :3].tolist(), scales.tolist()  # 7 / 448 is a 64th
    ([448.0, 224.0, -64.0], [[0.015625]])
    """

    def cast(x_ND: Tensor) -> tuple[Tensor, Tensor]:
        groups = x_ND.detach().float().view(num_rows, hidden // GROUP, GROUP)
        amax = groups.abs().amax(2).clamp(1e-4)
        scales, factors = amax / FP8_MAX, amax.reciprocal() * FP8_MAX
        if round_scale:
            scales = _round_up(scales)
            factors = scales.reciprocal()
        values = (groups * factors[:, :, None]).to(torch.float8_e4m3fn).view(num_rows, hidden)
        if use_ue8m0:
            exponents = (scales.view(torch.int32) >> 23).to(torch.uint8).flatten()
            scales = exponents.view(torch.int32).view(num_rows, hidden // (PER_WORD * GROUP))
        return values, scales

    return cast


def _round_up(scales: Tensor) -> Tensor:
    """To powers of two. A float without a fraction is one; carrying into the exponent doubles it.

    >>> _round_up(torch.tensor([0.25, 0.26, torch.inf, torch.nan])).tolist()
    [0.25, 0.5, inf, nan]
    """
    bits = (scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(scales.isnan(), scales, bits.view(torch.float32))


def plan_from_fp8(
    num_rows: int, hidden: int, use_ue8m0: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """
    >>> values = torch.tensor([[448.0, 224.0, -64.0] + [0.0] * 125]).to(torch.float8_e4m3fn)
    >>> plan_from_fp8(1, 128, False)(values, torch.tensor([[0.015625]]))[0, :3].tolist()
    [7.0, 3.5, -1.0]
    """

    def cast_back(x_fp8: Tensor, scales_NS: Tensor) -> Tensor:
        if use_ue8m0:
            scales_NS = (scales_NS.view(torch.uint8).int() << 23).view(torch.float32)
        groups = x_fp8.detach().float().view(num_rows, hidden // GROUP, GROUP)
        return (groups * scales_NS.detach()[:, :, None]).bfloat16().view(num_rows, hidden)

    return cast_back
