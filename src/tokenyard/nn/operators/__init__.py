"""The operators of torch.library behind `nn.functional`, their shapes and their gradients.

    operator        gradient                    and that one's
    dispatch        combine_both                dispatch_again, twice
    combine         dispatch_again              combine
    permute         unpermute                   spread
    unpermute       unpermute_backward          unpermute and unpermute_backward
    grouped_mm      grouped_mm, grouped_outer   grouped_mm
    sum_over_ranks  sum_over_ranks              sum_over_ranks

dispatch_by_expert has the gradients of permute after dispatch, combine_by_expert those of combine
after unpermute.

Every gradient is made of these operators again, so gradients of gradients need no more code. Where
autograd has no gradient for an output it passes zeros, so a rank still exchanges rows like the
others.
"""

from tokenyard.nn.operators.by_expert import combine_by_expert, dispatch_by_expert
from tokenyard.nn.operators.define import is_looked_at
from tokenyard.nn.operators.exchange import (
    combine,
    combine_both,
    dispatch,
    dispatch_again,
    gather_over_ranks,
    same_on_all_ranks,
    sum_over_ranks,
)
from tokenyard.nn.operators.grouped import grouped_mm, grouped_outer
from tokenyard.nn.operators.permute import permute, spread, unpermute, unpermute_backward

__all__ = [
    "combine",
    "combine_both",
    "combine_by_expert",
    "dispatch",
    "dispatch_again",
    "dispatch_by_expert",
    "gather_over_ranks",
    "grouped_mm",
    "grouped_outer",
    "is_looked_at",
    "permute",
    "same_on_all_ranks",
    "spread",
    "sum_over_ranks",
    "unpermute",
    "unpermute_backward",
]
