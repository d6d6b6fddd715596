"""With a balance each rank's kernels compute with the experts of all ranks of its node.

vLLM packs a layer's weights for its kernel where they are loaded. What it has packed then moves to
memory that the ranks of a node share: the layer keeps its part, and the kernel is given the whole.
"""

from __future__ import annotations

import math
import mmap
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
    packed = {"w1": layer.w13_weight, "w2": layer.w2_weight}
    for one in packed.values():
        num_bytes = math.prod(one.shape[1:]) * one.element_size()
        if num_bytes % mmap.PAGESIZE:  # there would be gaps, which the kernel does not know
            refuse(f"an expert has {num_bytes} bytes, want a multiple of {mmap.PAGESIZE}")
            return {}
    biases = [one for one in (quant_config._w1, quant_config._w2) if one.bias is not None]
    try:
        stacks = {name: buffer.share_stack(one.data) for name, one in packed.items()}
        of_node = [buffer.share_stack(one.bias.data).node.contiguous() for one in biases]
    except SharedMemoryError as error:
        refuse(str(error))
        return {}
    for name, one in packed.items():
        one.data = stacks[name].own
    for one, bias in zip(biases, of_node):  # small enough for a copy on each rank
        one.bias = bias
    return {name: stack.node for name, stack in stacks.items()}
