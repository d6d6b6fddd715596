"""Stacks of experts in memory that the ranks of a node share: all ranks make them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.agreement import Call, Terms
from tokenyard.engine.engine import Engine
from tokenyard.engine.mismatch import STAGES
from tokenyard.errors import TEXT_WORDS, SharedMemoryError, text_to_words, words_to_text
from tokenyard.shm.stack import TOLD, Making, Stack
from tokenyard.types import digest

_STAGE = "share stack"


def share_stack(engine: Engine, own: Any) -> Stack:
    """See `Buffer.share_stack`."""
    engine.worker.drain()
    try:
        stack = _checked(own)
        kind = digest(repr((list(stack.shape[1:]), str(stack.dtype))))
    except Exception as error:
        engine.reject(_STAGE, error)
    engine.agreement.meet(_STAGE, Terms(Call(stage=STAGES.index(_STAGE), options=kind)))
    topology = engine.topology
    ranks = topology.ranks_of_node[topology.node_of_rank[engine.rank]]
    lengths = _tell(engine, [len(stack)])[:, 0].tolist()
    making = Making(stack, ranks, [lengths[rank] for rank in ranks], engine.rank)
    words: Sequence[int] = ()
    failure: SharedMemoryError | None = None
    shared: Stack | None = None
    try:
        try:
            words = making.write()
        except SharedMemoryError as error:
            failure = error
        told = _tell(engine, words, failure).tolist()
        try:
            shared = making.map([told[rank] for rank in ranks])
        except SharedMemoryError as error:
            failure = error
        _tell(engine, (), failure)  # no rank may close its segment before all have mapped it
    finally:
        making.close()
    assert shared is not None
    return shared


def _checked(own: Any) -> Tensor:
    if not isinstance(own, Tensor):
        raise validate.not_a_tensor("own", own)
    stack = own.detach()
    validate.require(own.dim() > 0, "own has shape [], want [experts, ...]")
    validate.require(
        type(stack) is Tensor and own.layout is torch.strided and not own.is_quantized,
        f"own is {validate.kind(stack)} of dtype {validate.name(own.dtype)} and layout "
        f"{own.layout}, want a plain torch.Tensor",
    )
    validate.require(own.is_cpu, f"own is on device {own.device}, want cpu")
    return validate.held("own", stack)


def _tell(
    engine: Engine, words: Sequence[int], failure: SharedMemoryError | None = None
) -> np.ndarray:
    """[R, TOLD] what all ranks tell each other. If one has failed, all raise, and say why."""
    mine = np.zeros(TOLD + TEXT_WORDS, np.int64)
    mine[: len(words)] = words
    mine[TOLD:] = text_to_words("" if failure is None else str(failure))
    told = engine.transport.exchange(np.tile(mine, (engine.num_ranks, 1)), _STAGE)
    for rank, text in enumerate(told[:, TOLD:]):
        if text[0]:
            error = SharedMemoryError(f"{_STAGE}: rank {rank} failed: {words_to_text(text)}")
            error.on_all_ranks = True
            raise error from failure
    return told[:, :TOLD]
