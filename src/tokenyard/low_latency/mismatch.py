"""What two posts that cannot meet differ in."""

from __future__ import annotations

import numpy as np

from tokenyard.types import ROW_DTYPES
from tokenyard.wire.fp8 import NO_CAST, PACKED, PLAIN, ROUNDED
from tokenyard.wire.slots import DTYPE_TERM, HANDLE, NUMBER, TERMS, Stray

_TERM_NAMES = (
    "num_max_dispatch_tokens_per_rank",
    "hidden size",
    "top-k",
    "num_experts",
    "dtype of x",
    "use_fp8, round_scale or use_ue8m0",
)
_CASTS = {NO_CAST: "none", PLAIN: "use_fp8", ROUNDED: "round_scale", PACKED: "use_ue8m0"}


def say_difference(stage: str, rank: int, mine: np.ndarray, other: int, theirs: np.ndarray) -> str:
    """What two posts that cannot meet differ in. Stray if the other's is no post of any call."""
    _check_terms(other, theirs)
    what, own, their = "how many low-latency calls they made", mine[NUMBER], theirs[NUMBER]
    if own == their:
        what, own, their = "the handle (by its dispatch's number)", mine[HANDLE], theirs[HANDLE]
        for place, name in enumerate(_TERM_NAMES):
            if mine[TERMS + place] != theirs[TERMS + place]:
                what, own, their = name, mine[TERMS + place], theirs[TERMS + place]
                break
    if own == their:
        raise Stray(other)
    if what == _TERM_NAMES[DTYPE_TERM]:
        own, their = (str(ROW_DTYPES[one]).removeprefix("torch.") for one in (own, their))
    elif what == _TERM_NAMES[-1]:
        own, their = (_CASTS[one] for one in (int(own), int(their)))
    return f"{stage}: ranks differ in {what}: {own} on rank {rank}, {their} on rank {other}"


def _check_terms(rank: int, post: np.ndarray) -> None:
    *sizes, dtype, cast = post[TERMS : TERMS + len(_TERM_NAMES)].tolist()
    if (
        not all(0 <= size < 1 << 48 for size in sizes)
        or not 0 <= dtype < len(ROW_DTYPES)
        or cast not in _CASTS
    ):
        raise Stray(rank)
