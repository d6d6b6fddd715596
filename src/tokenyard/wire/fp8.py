"""FP8 rows: how many elements share a scale, the largest number, and the codes of the casts."""

from __future__ import annotations

GROUP = 128  # elements that share a scale
FP8_MAX = 448.0  # the largest number of float8_e4m3fn
PER_WORD = 4  # packed scales in an int32

# How rows are cast, by their scales.
NO_CAST = -1  # not at all
PLAIN = 0  # the group's largest magnitude / FP8_MAX, a float32
ROUNDED = 1  # that, rounded up to a power of two
PACKED = 2  # the exponent of that power alone, a byte
