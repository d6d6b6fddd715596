"""The low-latency mode's steps, in plain torch.

Two ranks with an expert each; rank 0 has three tokens:

>>> from tokenyard.wire.slots import NO_CAST
>>> from tokenyard.topology import Placement
>>> def shape(rank):
...     return SlotShape(rank=rank, num_ranks=2, num_max=4, hidden=1, num_topk=2,
...         dtype=torch.float32, dtype_code=1, cast=NO_CAST, placement=Placement.even(2, 2))
>>> x, idx = torch.tensor([[10.0], [11.0], [12.0]]), torch.tensor([[1, 0], [-1, 1], [1, -1]])
>>> block, sent = torch.zeros(shape(0).block_bytes, dtype=torch.uint8), torch.zeros_like(
...     idx.expand(2, 3, 2))
>>> stage_slots(x, idx, shape(0), block, sent)
-1
>>> sent[1].tolist()  # the second and third pairs of expert 1
[[0, 0], [-1, 1], [2, -1]]
>>> got = SlotResults(x=torch.zeros(1, 8, 1), scales=None, counts=torch.zeros(1, dtype=torch.int32),
...     src_info=torch.zeros(1, 8, dtype=torch.int32), layout_range=torch.zeros(1, 2).long())
>>> fill_slots([block, block], [3, 0], shape(1), got)
>>> got.x.flatten().tolist(), got.src_info.flatten().tolist(), got.counts.tolist()
([10.0, 11.0, 12.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0, 1, 2, 0, 0, 0, 0, 0], [3])
>>> back = [torch.zeros(4, 4, dtype=torch.uint8) for _ in range(2)]
>>> tables = torch.zeros(2, 1).long()
>>> stage_back(got.x + 1, got.layout_range, back, tables)
>>> back[0].view(torch.float32).flatten().tolist(), tables.tolist()
([11.0, 12.0, 13.0, 0.0], [[0], [0]])
>>> picked = torch.empty_like(idx)
>>> pick_slots(idx, sent, picked)
-1
>>> rows, tables = [torch.tensor([[7.0]]), back[0].view(torch.float32)], torch.zeros(2, 1).long()
>>> pairs = SlotPairs(idx, picked, torch.ones(3, 2))
>>> sum_slots(rows, tables, pairs, shape(0), torch.empty(3, 1))
tensor([[18.],
        [12.],
        [13.]])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenyard.kernels.base import wide_dtype
from tokenyard.kernels.reference.quantize import plan_to_fp8
from tokenyard.wire.fp8 import NO_CAST, PACKED, PLAIN
from tokenyard.wire.slots import SlotPairs, SlotResults, SlotShape, Stray


def stage_slots(
    x_TD: Tensor, topk_idx_TK: Tensor, shape: SlotShape, block_B: Tensor, sent_2TK: Tensor
) -> int:
    num_tokens, num_topk = topk_idx_TK.shape
    seen = [0] * shape.placement.num_experts
    nth = []
    for token, experts in enumerate(topk_idx_TK.tolist()):
        for k, expert in enumerate(experts):
            if not -1 <= expert < len(seen):
                return token * num_topk + k
            if expert >= 0 and expert in experts[:k]:
                return -2 - (token * num_topk + k)
            nth.append(seen[expert] if expert >= 0 else -1)
            if expert >= 0:
                seen[expert] += 1
    sent_2TK[0] = topk_idx_TK
    sent_2TK[1] = torch.tensor(nth, dtype=torch.int64, device="cpu").view(num_tokens, num_topk)
    rows, scales = x_TD, None
    if shape.cast != NO_CAST:
        cast = plan_to_fp8(
            num_tokens, shape.hidden, shape.dtype, shape.cast != PLAIN, shape.cast == PACKED
        )
        rows, scales = cast(x_TD)
    topk, to_rows, to_scales = _parts(block_B, shape)
    topk[:num_tokens] = topk_idx_TK
    to_rows[:num_tokens] = rows.view(torch.uint8)
    if to_scales is not None and scales is not None:
        to_scales[:num_tokens] = scales.view(torch.uint8)
    return -1


def fill_slots(
    blocks: Sequence[Tensor], tokens: Sequence[int], shape: SlotShape, out: SlotResults
) -> None:
    own, num_experts = shape.placement.experts_of_rank[shape.rank], shape.placement.num_experts
    for source, block in enumerate(blocks):
        topk = _parts(block, shape)[0][: max(0, tokens[source])]
        if not 0 <= tokens[source] <= shape.num_max or ((topk < -1) | (topk >= num_experts)).any():
            raise Stray(source)
    for local, expert in enumerate(own):
        slot = 0
        for source, block in enumerate(blocks):
            begin = slot
            topk, rows, scales = _parts(block, shape)
            chosen = (topk[: tokens[source]] == expert).any(1).nonzero()[:, 0]
            slot += len(chosen)
            out.x[local, begin:slot].view(torch.uint8).copy_(rows[chosen])
            if out.scales is not None and scales is not None:
                out.scales[local, begin:slot].view(torch.uint8).copy_(scales[chosen])
            out.src_info[local, begin:slot] = chosen
            out.layout_range[local, source] = begin << 32 | (slot - begin)
        out.counts[local] = slot


def stage_back(
    y_LSD: Tensor, layout_range_LR: Tensor, outs: Sequence[Tensor], tables_RL: Tensor
) -> None:
    rows_LSB = y_LSD.view(torch.uint8)
    for source, out_NB in enumerate(outs):
        row = 0
        for local, ranges in enumerate(layout_range_LR[:, source].tolist()):
            begin, count = divmod(ranges, 1 << 32)
            out_NB[row : row + count] = rows_LSB[local, begin : begin + count]
            tables_RL[source, local] = row
            row += count


def pick_slots(topk_idx_TK: Tensor, sent_2TK: Tensor, picked_TK: Tensor) -> int:
    num_topk = topk_idx_TK.shape[1]
    sent, nth = sent_2TK.tolist()
    for token, experts in enumerate(topk_idx_TK.tolist()):
        for k, expert in enumerate(experts):
            if expert >= 0 and expert in sent[token]:
                picked_TK[token, k] = nth[token][sent[token].index(expert)]
            elif expert == -1:
                picked_TK[token, k] = -1
            else:
                return token * num_topk + k
    return -1


def sum_slots(
    rows: Sequence[Tensor], tables_RL: Tensor, pairs: SlotPairs, shape: SlotShape, out_TD: Tensor
) -> Tensor:
    wide = wide_dtype(out_TD.dtype)
    ranks, locals_ = shape.placement.rank_of_expert, shape.placement.local_of_expert
    for token, (experts, picks) in enumerate(zip(pairs.topk_idx.tolist(), pairs.picked.tolist())):
        total = torch.zeros(shape.hidden, dtype=wide, device="cpu")
        for k, (expert, pick) in enumerate(zip(experts, picks)):
            if expert < 0:
                continue
            owner = int(ranks[expert])
            first = int(tables_RL[owner, int(locals_[expert])])
            if not 0 <= first < len(rows[owner]) - pick:
                raise Stray(owner)
            row = first + pick
            total = total + pairs.weights[token, k].to(wide) * rows[owner][row].to(wide)
        out_TD[token] = total.to(out_TD.dtype)
    return out_TD


def _parts(block_B: Tensor, shape: SlotShape) -> tuple[Tensor, Tensor, Tensor | None]:
    """topk_idx [num_max, K], and rows and scales as bytes."""
    num_max, at = shape.num_max, shape.scales_at
    topk = block_B[: 8 * num_max * shape.num_topk].view(torch.int64).view(num_max, -1)
    rows = block_B[shape.rows_at : shape.rows_at + num_max * shape.row_bytes].view(num_max, -1)
    if shape.cast == NO_CAST:
        return topk, rows, None
    return topk, rows, block_B[at : at + num_max * shape.scale_bytes].view(num_max, -1)
