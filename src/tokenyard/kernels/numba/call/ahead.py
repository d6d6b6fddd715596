"""What calls to come will want: processes that wait while another compiles make it meanwhile."""

from __future__ import annotations

import torch
from numba import int64

from tokenyard.kernels.numba.caching import expect
from tokenyard.kernels.numba.call import by_expert
from tokenyard.kernels.numba.call.sums import combine_of, sums_of


def expect_calls(dtype: torch.dtype) -> None:
    """Dispatches whose rows come back in this dtype: their combines, and those by expert. Rows of
    float32 are those of training, whose combines sum weights too.
    """
    expect(combine_of(dtype), (by_expert._dispatch_kernel, (int64,)))
    if dtype == torch.float32:
        expect(sums_of(dtype))
