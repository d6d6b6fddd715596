"""`kernels.balancing`, compiled."""

from tokenyard.kernels import balancing
from tokenyard.kernels.numba.caching import njit

count_pairs = njit(nogil=True, cache=True)(balancing.count_pairs)
assign = njit(nogil=True, cache=True)(balancing.assign)
take_slots = njit(nogil=True, cache=True)(balancing.take_slots)
