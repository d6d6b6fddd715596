"""What one rank cannot do, no rank does: loading and saving end alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tokenyard.errors import PeerInputError, text_to_words, words_to_text


@contextmanager
def together(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """All ranks leave it when all are done. If one fails, it raises its own error, and the others
    raise PeerInputError with the words of that.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    said = "" if error is None else f"{type(error).__name__}: {error}"
    mine = torch.from_numpy(text_to_words(said))
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group)
    if error is not None:
        raise error
    for rank, words in enumerate(every):
        if words[0]:
            text = (
                f"{what} failed on rank {rank}, so no rank went on: {words_to_text(words.numpy())}"
            )
            raise PeerInputError(text, rank=rank, stage=what)
