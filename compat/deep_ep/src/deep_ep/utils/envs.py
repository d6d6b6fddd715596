"""How DeepEP's own tests start their ranks, here on CPUs."""

from tokenyard.compat.deepep_tests import (
    dist_print,
    get_global_seed,
    get_local_seed,
    get_logical_domain_size,
    get_nvlink_gbs,
    get_physical_domain_size,
    get_rdma_gbs,
    init_dist,
    init_seed,
)

__all__ = [
    "dist_print",
    "get_global_seed",
    "get_local_seed",
    "get_logical_domain_size",
    "get_nvlink_gbs",
    "get_physical_domain_size",
    "get_rdma_gbs",
    "init_dist",
    "init_seed",
]
