"""How DeepEP's own tests measure, here by the clock."""

from tokenyard.compat.deepep_tests import bench, bench_kineto

__all__ = ["bench", "bench_kineto"]
