"""What two posts of the low-latency mode that cannot meet differ in."""

from __future__ import annotations

import numpy as np

from tokenyard.engine.mismatch import CASTS, differ
from tokenyard.errors import CallMismatch
from tokenyard.types import ROW_DTYPES
from tokenyard.wire.slots import HANDLE, NUMBER, TERMS, Stray

# The words of a post that ranks must agree on, in the order in which a difference is reported.
_TERMS = ("num_max", "hidden", "num_topk", "num_experts", "dtype", "cast")
_COMPARED = {
    "post_number": NUMBER,
    **{term: TERMS + place for place, term in enumerate(_TERMS)},
    "post_handle": HANDLE,
}


def posts_differ(
    stage: str, rank: int, mine: np.ndarray, other: int, theirs: np.ndarray
) -> CallMismatch:
    """The first difference between this rank's post and another's. Raises Stray if the other's is
    no post of any call.
    """
    _check_terms(other, theirs)
    for term, word in _COMPARED.items():
        own, their = int(mine[word]), int(theirs[word])
        if own != their:
            return differ(stage, term, (rank, own), (other, their))
    raise Stray(other)


def _check_terms(rank: int, post: np.ndarray) -> None:
    *sizes, dtype, cast = post[TERMS : TERMS + len(_TERMS)].tolist()
    if (
        not all(0 <= size < 1 << 48 for size in sizes)
        or not 0 <= dtype < len(ROW_DTYPES)
        or cast not in CASTS
    ):
        raise Stray(rank)
