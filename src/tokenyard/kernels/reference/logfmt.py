"""Rows as a receiver of LogFMT has them (`spec.logfmt`), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, from_numpy

from tokenyard.wire.logfmt import CLIP, EXP2, GROUP, LOG2, MOST_CODE, STEPS, block_of, log2_table


def logfmt(y_ND: Tensor, out_ND: Tensor) -> None:
    """Encode bfloat16 rows and decode them again, into float32 rows."""
    num_rows, hidden = y_ND.shape
    each = block_of(hidden)
    values = y_ND.reshape(num_rows, hidden // each, each // GROUP, GROUP)
    bits = values.view(torch.int16).to(torch.int64) & 0x7FFF
    logs = from_numpy(log2_table()).to(y_ND.device)[bits]
    high = logs.amax(-1, keepdim=True)
    low = torch.maximum(logs.amin(-1, keepdim=True), high - CLIP)
    casts = ((high < 0) & (low < high)).all(-2, keepdim=True)
    step = torch.where(casts, high - low, 1.0) / torch.full_like(high, STEPS)
    per_step = torch.ones_like(step) / step
    middle = (1 + _exp2(step)) * 0.5
    first = 2 - _log2_near_one(middle) * per_step - low * per_step
    codes = (logs * per_step + first).clamp(min=0).floor().clamp(max=MOST_CODE)
    sizes = _exp2(torch.where(casts, (codes - 1) * step + low, 0.0))
    decoded = torch.where(codes == 0, 0.0, sizes).copysign(values.float())
    out_ND.copy_(torch.where(casts, decoded, values.float()).view(num_rows, hidden))


def _exp2(power: Tensor) -> Tensor:
    wide = power.double()
    whole = (wide + 0.5).floor()
    part, total = wide - whole, torch.zeros_like(wide)
    for factor in reversed(EXP2):
        total = total * part + factor
    scale = ((whole.long() + 1023) << 52).view(torch.float64)  # an exact power of two
    return (total * scale).float()


def _log2_near_one(value: Tensor) -> Tensor:
    wide = value.double()
    ratio = (wide - 1) / (wide + 1)
    square, total = ratio * ratio, torch.zeros_like(wide)
    for factor in reversed(LOG2):
        total = total * square + factor
    return (total * ratio).float()
