"""Which tests of the gate can see a file of the source, from cheap to dear."""

from __future__ import annotations

from typing import NamedTuple

from tools.faults.fault import Fault


class Stage(NamedTuple):
    """One run of pytest."""

    paths: tuple[str, ...]  # files, folders, or file.py::test
    marks: str  # the marks that .ci/run asks for, or some of them
    interprets_triton: bool = False
    needs_vllm: bool = False

    def __str__(self) -> str:
        return f"{' '.join(self.paths)} ({self.marks})"


def file_of(path: str) -> str:
    return path.split("::")[0]


def _quick(*paths: str) -> Stage:
    return Stage(paths, "not slow and not processes and not docs")


def _processes(*paths: str) -> Stage:
    return Stage(paths, "processes and not slow")


def _all(*paths: str) -> Stage:
    return Stage(paths, "not slow")


def _triton(*paths: str) -> Stage:
    return Stage(paths, "triton and not slow", interprets_triton=True)


_OTHERS = ("all_gather", "combine_out", "direct", "offers", "properties", "replicas", "symmetric")
_CONFORMANCE = "tests/transports/test_conformance.py", "tests/transports/test_by_expert.py"
_NODES = (
    "tests/engine/test_nodes.py",
    "tests/transports/test_hierarchical.py",
    "tests/transports/test_enclosed.py",
)
_REPLICAS = (
    "tests/test_replicas.py",
    "tests/transports/test_replicas.py",
    "tests/engine/test_rebalance.py",
    "tests/nn/test_rebalance.py",
)
_FAULTS = (
    Stage(("tests/faults",), "not slow and not alone"),
    Stage(("tests/faults",), "alone and not slow"),
)
_FUZZ = _all("tests/fuzz")
# What every file can show that rows pass through.
_EXCHANGE = (
    _quick(*_CONFORMANCE),
    _quick(*(f"tests/transports/test_{name}.py" for name in _OTHERS)),
    _processes("tests/transports"),
    *_FAULTS,
    _FUZZ,
)
_LOW_LATENCY = (
    _quick("tests/kernels/test_low_latency.py", "tests/kernels/test_logfmt.py"),
    _quick("tests/low_latency"),
    _processes("tests/low_latency"),
    *_FAULTS,
    _FUZZ,
)
_BETWEEN_NODES = (_quick(*_NODES), _processes(*_NODES), *_EXCHANGE)
_COPIES = (_quick(*_REPLICAS), _processes(*_REPLICAS), _processes("tests/nn"), _FUZZ)

# By the beginning of a path under src/tokenyard: the longest one counts.
STAGES: dict[str, tuple[Stage, ...]] = {
    "comm/": (
        _quick("tests/comm"),
        _processes("tests/comm", "tests/test_opening.py"),
        *_FAULTS,
        _all("tests/cluster"),
    ),
    "compat/elastic/": (
        _quick("tests/compat/elastic"),
        _processes("tests/compat/elastic"),
        *_FAULTS,
        _FUZZ,
    ),
    "engine/": (
        _quick("tests/engine", "tests/test_stats.py", "tests/test_buffer.py"),
        _processes("tests/engine", "tests/test_stats.py"),
        *_EXCHANGE,
    ),
    "engine/by_expert.py": _EXCHANGE,
    "engine/choice.py": _COPIES,
    "engine/lane_order.py": (
        _quick("tests/compat/elastic"),
        _processes("tests/compat/elastic"),
        _FUZZ,
    ),
    "engine/nodes.py": (_quick("tests/test_stats.py"), *_BETWEEN_NODES),
    "engine/parcels.py": _EXCHANGE,
    "compat/hybrid_ep/": (
        _quick("tests/compat/hybrid_ep"),
        _processes("tests/compat/hybrid_ep"),
        _FUZZ,
    ),
    "integrations/transformers/": (_all("tests/integrations"), _all("tests/wrappers")),
    "integrations/vllm/": (
        _all("tests/integrations/test_vllm_plugin.py", "tests/integrations/test_vllm_exchange.py"),
        Stage(("tests/integrations/test_vllm_layers.py",), "not slow", needs_vllm=True),
    ),
    "kernels/numba/": (_quick("tests/kernels"), *_EXCHANGE),
    "kernels/numba/between_nodes/": _BETWEEN_NODES,
    "kernels/numba/call/": (_quick("tests/engine", "tests/test_stats.py"), *_EXCHANGE),
    "kernels/numba/call/halves.py": _LOW_LATENCY,
    "kernels/numba/call/slot": _LOW_LATENCY,
    "kernels/numba/layout.py": (
        _quick("tests/kernels"),
        _quick("tests/compat/elastic"),
        *_EXCHANGE,
    ),
    "kernels/numba/ring/": (
        _quick("tests/kernels/test_ring.py", "tests/transports/test_ring.py"),
        _processes("tests/transports/test_ring.py"),
        *_EXCHANGE,
    ),
    "kernels/triton/": (_triton("tests/kernels"), _triton("tests/transports")),
    "low_latency/": _LOW_LATENCY,
    "nn/": (_quick("tests/nn"), _processes("tests/nn"), _all("tests/integrations")),
    "planner/": (_quick("tests/planner", "tests/tools/cli"),),
    "runtime/": (
        _quick("tests/runtime"),
        _quick("tests/engine"),
        _processes("tests/shm", "tests/engine"),
        *_EXCHANGE,
    ),
    "shm/": (_quick("tests/shm", "tests/runtime"), _processes("tests/shm"), *_EXCHANGE),
    "transports/hierarchical/": _BETWEEN_NODES,
    "validate/": (_quick("tests/test_buffer.py", "tests/test_types.py"), *_FAULTS, *_EXCHANGE),
}


def stages_of(fault: Fault) -> tuple[Stage, ...]:
    """The tests that should find it, and then all that can see its file."""
    known = [one for one in STAGES if fault.path.startswith(one)]
    if not known:
        raise ValueError(f"no tests are known for {fault.path}, want an entry in STAGES")
    first = (_all(fault.first),) if fault.first else ()
    return first + STAGES[max(known, key=len)]
