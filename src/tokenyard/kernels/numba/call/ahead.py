"""What calls to come will want: processes that wait while another compiles make it meanwhile."""

from __future__ import annotations

from functools import cache

import torch
from numba import int64

from tokenyard.kernels.numba.caching import expect
from tokenyard.kernels.numba.call import by_expert
from tokenyard.kernels.numba.call.sums import combine_of, sums_of


@cache
def expect_calls(dtype: torch.dtype) -> None:
    """Expect what follows a dispatch whose rows come back in this dtype: its combine, dispatches by
    expert. Rows of float32 are those of training, where combines sum weights too.
    """
    expect(combine_of(dtype), (by_expert._dispatch_kernel, (int64,)))
    if dtype == torch.float32:
        expect(sums_of(dtype))
