"""FP8 rows: how many elements share a scale, and the codes of the ways to cast them."""

from __future__ import annotations

GROUP = 128  # elements that share a scale
NO_CAST, PLAIN, ROUNDED, PACKED = -1, 0, 1, 2  # how rows are cast to FP8, if they are
