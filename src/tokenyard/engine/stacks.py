"""Stacks of experts in memory that the ranks of a node share: all ranks make them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
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
        own = _checked(own)
        kind = digest(repr((list(own.shape[1:]), str(own.dtype))))
    except Exception as error:
        engine.reject(_STAGE, error)
    engine.agreement.meet(_STAGE, Terms(Call(stage=STAGES.index(_STAGE), options=kind)))
    nodes, told = engine.topology, _tell(engine, lambda: (len(own),))
    here = nodes.ranks_of_node[nodes.node_of_rank[engine.rank]]
    with closing(Making(own, {rank: told[rank][0] for rank in here}, engine.rank)) as making:
        words = _tell(engine, making.take)
        _tell(
            engine, lambda: making.map(words)
        )  # no rank may close before all have mapped it, and written
    return making.stack


def _checked(own: Any) -> Tensor:
    if not isinstance(own, Tensor):
        raise validate.not_a_tensor("own", own)
    stack = own.detach()
    is_plain = type(stack) is Tensor and own.layout is torch.strided and not own.is_quantized
    validate.require(
        is_plain and own.is_cpu and own.dim() > 0,
        f"own is {validate.kind(stack)} of shape {list(own.shape)}, dtype {own.dtype} and layout "
        f"{own.layout} on {own.device}, want a plain torch.Tensor [experts, ...] on cpu",
    )
    return validate.held("own", stack)


def _tell(engine: Engine, make: Callable[[], Sequence[int]]) -> list[list[int]]:
    """[R, TOLD] the words that all ranks make. If one fails, all raise, and say why."""
    mine, failure = np.zeros(TOLD + TEXT_WORDS, np.int64), None
    try:
        words = make()
        mine[: len(words)] = words
    except SharedMemoryError as error:
        failure, mine[TOLD:] = error, text_to_words(str(error))
    told = engine.transport.exchange(np.tile(mine, (engine.num_ranks, 1)), _STAGE)
    for rank, text in enumerate(told[:, TOLD:]):
        if text[0]:
            wrong = SharedMemoryError(f"{_STAGE}: rank {rank} failed: {words_to_text(text)}")
            wrong.on_all_ranks = True
            raise wrong from failure
    return told[:, :TOLD].tolist()
