"""What DeepEP's own tests need to run on CPUs: their ranks, their clock, and a torch without CUDA.

`deep_ep.utils.envs` and `deep_ep.utils.testing` of compat/deep_ep name these functions. `init_dist`
changes torch for the whole process, which in those tests is a rank and nothing else; no other code
should call it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tokenyard.compat.elastic import ElasticBuffer
from tokenyard.runtime import variables
from tokenyard.testing.processes import LOOPBACK
from tokenyard.validate import require

_MOST_CALLS = 10  # of a measurement: DeepEP's numbers are for kernels of microseconds
# Elements from which on a measurement leaves out what these make.
_LOADS = {torch.randn: 4096**2, Tensor.matmul: 4096**2, Tensor.__matmul__: 4096**2}
_LOADS[torch.zeros] = 2**32
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

_local_rank = 0
_global_seed = 0
_local_seed = 0


def init_dist(
    local_rank: int, num_local_ranks: int, seed: int = 0
) -> tuple[int, int, dist.ProcessGroup]:
    """Make this process a rank over gloo in which "cuda" means the CPU: (rank, ranks, group).

    As with DeepEP, MASTER_ADDR and MASTER_PORT say where ranks meet, WORLD_SIZE is the number of
    nodes and RANK that of this node; bfloat16 becomes the default dtype. Where torchrun starts all
    ranks of a node, these two count ranks.
    """
    global _local_rank
    _local_rank = local_rank
    address = variables.read("MASTER_ADDR")
    port = variables.number("MASTER_PORT")
    num_nodes, node = variables.number("WORLD_SIZE", 1), variables.number("RANK")
    per_node = variables.number("LOCAL_WORLD_SIZE", 1)
    if per_node > 1:  # of torchrun
        here = variables.number("LOCAL_RANK")
        require(
            (local_rank, num_local_ranks) == (here, per_node),
            f"init_dist({local_rank}, {num_local_ranks}) is called in rank {here} of {per_node} "
            f"that torchrun started here, want init_dist({here}, {per_node}); start a program that "
            "spawns its ranks itself with python, or torchrun --nproc-per-node 1",
        )
        num_nodes, node = num_nodes // per_node, node // per_node
    if num_nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_local_ranks))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=node * num_local_ranks + local_rank,
        world_size=num_nodes * num_local_ranks,
    )
    use_cpu_for_cuda()
    torch.set_default_dtype(torch.bfloat16)
    init_seed(seed)
    group = dist.new_group(list(range(dist.get_world_size())))
    return dist.get_rank(), dist.get_world_size(), group


def init_seed(global_seed: int) -> None:
    """Every rank draws other numbers, the same in every run."""
    global _global_seed, _local_seed
    _global_seed, _local_seed = global_seed, global_seed + dist.get_rank()
    torch.manual_seed(_local_seed)
    random.seed(_local_seed)


def get_global_seed() -> int:
    return _global_seed


def get_local_seed() -> int:
    return _local_seed


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print on all ranks, or on the first of each node, and meet."""
    if not once_in_node or _local_rank == 0:
        print(s, flush=True)
    dist.barrier()


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """(nodes, ranks of a node), as an ElasticBuffer finds them. All ranks of the group call it."""
    with ElasticBuffer(group) as buffer:
        return buffer.get_physical_domain_size()


def get_logical_domain_size(
    group: dist.ProcessGroup, allow_hybrid_mode: bool = True
) -> tuple[int, int]:
    """(nodes, ranks of a node) where hybrid mode is allowed, else (1, ranks)."""
    with ElasticBuffer(group, allow_hybrid_mode=allow_hybrid_mode) as buffer:
        return buffer.get_logical_domain_size()


def get_rdma_gbs(nic_name: str = "") -> float:
    """GB/s of a network card. No card is looked for; tests divide by the answer."""
    return 1.0


def get_nvlink_gbs(factor: float = 0.9) -> float:
    """GB/s of NVLink: there is none."""
    return 0.0


# The clock


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Seconds that a call takes: average, least, most. No cache is flushed."""
    taken = []
    with _mode.without_load():
        for _ in range(min(num_warmups, _MOST_CALLS)):
            fn()
        for _ in range(min(num_tests, _MOST_CALLS)):
            begin = time.perf_counter()
            fn()
            taken.append(time.perf_counter() - begin)
            if post_fn is not None:
                post_fn()
    return mean(taken), min(taken), max(taken)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    *,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
    **of_the_profiler: Any,
) -> Any:
    """Seconds of a whole call for each name: here no profiler tells kernels apart. So bandwidths
    that are computed from them are less than what was reached.
    """
    meet = dist.barrier if barrier is None else barrier
    taken = []
    with _mode.without_load():
        fn()
        for _ in range(min(num_tests, _MOST_CALLS)):
            meet()
            begin = time.perf_counter()
            fn()
            taken.append(time.perf_counter() - begin)
    seconds: Any = mean(taken)
    if num_kernels_per_period > 1:
        seconds = [seconds / num_kernels_per_period] * num_kernels_per_period
    return seconds if isinstance(kernel_names, str) else [seconds] * len(kernel_names)


# A torch without CUDA


class CpuForCuda(TorchFunctionMode):
    """A call that asks for a tensor on a GPU gets one on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._skips_load = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if "device" in given:
            given["device"] = _on_cpu(given["device"])
        if func is Tensor.to:
            args = [_on_cpu(one) for one in args]
        if self._skips_load and func in _LOADS:
            light = _light(args, _LOADS[func])
            if light is not None:
                return light
        return func(*args, **given)

    def without_load(self) -> _WithoutLoad:
        """While a call is measured, large products and zeros of 16 GB are left out: they
        keep a GPU busy while rows travel, or flush its cache, and nobody reads them.
        """
        return _WithoutLoad(self)

    def skip_load(self, skips: bool) -> None:
        self._skips_load = skips


class _WithoutLoad:
    def __init__(self, mode: CpuForCuda) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._mode.skip_load(True)

    def __exit__(self, *_: object) -> None:
        self._mode.skip_load(False)


def _light(args: Sequence[Any], most: int) -> Tensor | None:
    """What stands for a matrix of so many elements or more: one number, seen from everywhere."""
    first = args[0] if args else None
    if isinstance(first, Tensor):
        return first if first.numel() >= most else None
    if isinstance(first, (tuple, list)) and len(first) == 2 and first[0] * first[1] >= most:
        return torch.zeros((), device="cpu", dtype=torch.float32).expand(*first)
    return None


def _on_cpu(value: Any) -> Any:
    """`cpu` for a device that is a GPU; anything else as it is."""
    named = str(value) if isinstance(value, (str, torch.device)) else ""
    return torch.device("cpu") if named.partition(":")[0] == "cuda" else value


class ClockEvent:
    """torch.cuda.Event where work is done when a call returns: the time of day."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: ClockEvent) -> float:
        """Milliseconds from this event to `end`."""
        return (end._at - self._at) * 1e3

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True


class DoneStream:
    """torch.cuda.Stream where work is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, event: ClockEvent | None = None) -> ClockEvent:
        event = event or ClockEvent()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


def _nothing(*_: Any, **__: Any) -> None: ...


_mode = CpuForCuda()
_STUBS: dict[str, Any] = {
    "Event": ClockEvent,
    "Stream": DoneStream,
    "_sleep": _nothing,
    "current_device": lambda: 0,
    "current_stream": lambda device=None: DoneStream(),
    "get_device_name": lambda device=None: "CPU",
    "get_device_properties": lambda device=None: SimpleNamespace(
        name="CPU", multi_processor_count=os.cpu_count() or 1
    ),
    "set_device": _nothing,
    "stream": nullcontext,
    "synchronize": _nothing,
}


def use_cpu_for_cuda() -> None:
    """From now on, and in this thread: "cuda" names the CPU, and what asks torch.cuda to wait does
    nothing. Functions that torch.compile made run as they were written, without a compiler.
    """
    torch.compiler.set_stance("force_eager")  # first: it lists what torch.cuda has
    for name, stub in _STUBS.items():
        setattr(torch.cuda, name, stub)
    setattr(Tensor, "record_stream", _nothing)  # noqa: B010 - its type is torch's
    for name in ("all_gather_into_tensor", "all_to_all_single"):
        setattr(dist, name, as_bytes(getattr(dist, name), name == "all_gather_into_tensor"))
    _mode.__enter__()


def as_bytes(collective: Callable[..., Any], flatten: bool) -> Callable[..., Any]:
    """gloo knows no float8, and gathers only into tensors with as many axes; NCCL does more."""

    def call(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.dtype in _FLOAT8:
            output, input = output.view(torch.uint8), input.view(torch.uint8)
        if flatten:
            output, input = output.view(-1), input.reshape(-1)
        return collective(output, input, *args, **kwargs)

    return call
