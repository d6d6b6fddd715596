"""Tokens by expert, in whole blocks: what a fused MoE kernel reads instead of topk_ids."""

from __future__ import annotations

from torch import Tensor

from tokenyard import kernels as kernel_sets
from tokenyard import validate
from tokenyard.types import Aligned, round_up

_USUAL = 1024  # experts


def moe_align_block_size(
    topk_ids: Tensor, block_size: int, num_experts: int, *, kernels: str = "auto"
) -> Aligned:
    """Group the (token, k) pairs of topk_ids [T, K] by expert, padded to whole blocks.

    As SGLang's function, it returns (sorted_token_ids, expert_ids, num_tokens_post_pad), all int32.
    A pair is given as its flat index in topk_ids; an expert's pairs ascend, and `topk_ids.numel()`
    stands for padding. topk_ids is int32 or int64, and -1 drops a pair. The rest of the capacity is
    padding, and its blocks have expert -1.

    >>> import torch
    >>> got = moe_align_block_size(torch.tensor([[2, 0], [2, 1]]), block_size=2, num_experts=3)
    >>> got.sorted_token_ids[: got.num_tokens_post_pad].tolist()  # experts 0, 1, 2 and 2
    [1, 4, 3, 4, 0, 2]
    >>> got.expert_ids.tolist(), got.num_tokens_post_pad.tolist()
    ([0, 1, 2, -1], [6])
    """
    # Input that is plainly right skips the full checks, which take as long as aligning a token.
    device = "cpu"
    if not (
        validate.lies_at(topk_ids, 2) != validate.NOT_PLAIN
        and topk_ids.dtype in validate.ID_DTYPES
        and topk_ids.numel()
        and type(block_size) is int
        and type(num_experts) is int
        and block_size > 0
        and 0 < num_experts <= _USUAL
    ):
        topk_ids = validate.topk_ids("topk_ids", topk_ids, num_tokens="tokens", device=None)
        validate.integer("block_size", block_size, at_least=1)
        validate.num_experts(num_experts, None)
        device = topk_ids.device.type
    numel = topk_ids.numel()
    if numel < num_experts:
        capacity = numel * block_size
    else:
        capacity = round_up(numel + num_experts * (block_size - 1), block_size)
    if capacity > validate.MOST:
        raise ValueError(
            f"{numel} pairs of {num_experts} experts in blocks of {block_size} take up to "
            f"{capacity} entries, want at most {validate.MOST}"
        )
    aligned, first_bad = kernel_sets.pick(kernels, device).align(
        topk_ids, block_size, num_experts, capacity
    )
    if first_bad >= 0:
        raise validate.bad_expert(topk_ids, first_bad, num_experts, "topk_ids")
    return aligned
