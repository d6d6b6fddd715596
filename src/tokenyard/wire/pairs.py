"""What a rank offers to a combine by expert, as the rank that sums reads it.

A word says which rows the offered memory holds: one for each token that the rank got, its share of
that token's sum; or one for each pair, to be summed with the pairs' weights or without.
"""

SHARES, WEIGHED, UNWEIGHED = range(3)
