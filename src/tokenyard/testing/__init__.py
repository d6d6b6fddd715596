"""The test kit, for users' tests too: ranks without a cluster, routings, an exact comparison.

    from tokenyard.testing import run_processes, run_virtual

    def job(group):
        with tokenyard.Buffer(group) as buffer:
            ...
            return result

    results = run_virtual(job, 64)      # threads of this process, no sockets
    results = run_processes(job, 4)     # real processes over gloo; `job` must be importable

Both call `job(group, *args)` on every rank and return the results by rank. `Cluster([2, 2])` does
the same on nodes with a network between them (Linux, root).
"""

from tokenyard.testing.cluster import Cluster, why_no_cluster
from tokenyard.testing.compare import assert_same, poisoned
from tokenyard.testing.processes import Exited, Processes, RankFailed, run_processes
from tokenyard.testing.routing import ROUTINGS, fake_experts, layout_of, numbered_tokens, routing
from tokenyard.testing.virtual import VirtualRun, run_virtual

__all__ = [
    "ROUTINGS",
    "Cluster",
    "Exited",
    "Processes",
    "RankFailed",
    "VirtualRun",
    "assert_same",
    "fake_experts",
    "layout_of",
    "numbered_tokens",
    "poisoned",
    "routing",
    "run_processes",
    "run_virtual",
    "why_no_cluster",
]
