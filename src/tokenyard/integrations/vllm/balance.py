"""With a balance each rank's kernels compute with the experts of all ranks of its node.

vLLM packs a layer's weights for its kernel where they are loaded. What it has packed then moves to
memory that the ranks of a node share: the layer keeps its part, and the kernel is given the whole.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.logger import init_logger

from tokenyard.buffer import Buffer
from tokenyard.errors import SharedMemoryError
from tokenyard.integrations.vllm import settings

_log = init_logger("vllm.plugins.tokenyard")


def refuse(why: str) -> None:
    """Say once why a balance that was asked for has no effect."""
    if settings.read().balance is not None:
        _log.info_once("TOKENYARD_VLLM_BALANCE has no effect: %s", why)


def share(buffer: Buffer, layer: Any, quant_config: Any) -> dict[str, Tensor]:
    """The packed weights of all ranks of the node, by the names of the kernel's arguments. Nothing
    if they cannot be shared, on all ranks alike.
    """
    held, biased = [layer.w13_weight, layer.w2_weight], []
    for name, described in (("w13_bias", quant_config._w1), ("w2_bias", quant_config._w2)):
        if described.bias is not None:
            described.bias = getattr(layer, name)  # after an earlier packing it was the node's
            held.append(described.bias)
            biased.append(described)
    try:
        stacks = [buffer.share_stack(one.data) for one in held]
    except SharedMemoryError as error:
        refuse(str(error))
        return {}
    for one, stack in zip(held, stacks):
        one.data = stack.own
    w1, w2, *biases = (stack.node for stack in stacks)
    for described, bias in zip(biased, biases):
        described.bias = bias
    return {"w1": w1, "w2": w2}
