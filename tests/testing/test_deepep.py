"""What DeepEP's own tests need on CPUs: a clock, and a torch in which "cuda" means the CPU."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.cases.processes import Pools
from tokenyard.compat import deepep_tests as deepep


def test_cuda_means_the_cpu() -> None:
    with deepep.CpuForCuda():
        made = [
            torch.ones(2, device="cuda"),
            torch.arange(2, device=torch.device("cuda:1")),
            torch.ones(2).to("cuda"),
            torch.ones(2).to(device="cuda:0"),
            torch.ones(2).cuda(),
        ]
        assert torch.empty(2, device="meta").device.type == "meta"
        assert torch.ones(2).to(torch.int32).dtype == torch.int32
    assert {one.device.type for one in made} == {"cpu"}


def test_only_a_measurement_leaves_out_large_products() -> None:
    mode = deepep.CpuForCuda()
    size = (4096, 4096)
    with mode:
        with mode.without_load():
            large = torch.randn(size, dtype=torch.float)
            assert (large @ large).shape == size
            assert large.untyped_storage().nbytes() < 64  # never made
            flush = torch.zeros((131072, 32768), dtype=torch.int)
            assert flush.untyped_storage().nbytes() < 64
            small = torch.full((2, 2), 3.0)
            assert (small @ small).tolist() == [[18.0] * 2] * 2
        assert torch.randn(size).untyped_storage().nbytes() == 4 * 4096**2


def test_measurements_have_the_form_of_deepeps() -> None:
    calls = []
    average, least, most = deepep.bench(lambda: calls.append(1), post_fn=lambda: calls.append(2))
    assert 0 <= least <= average <= most
    assert (calls.count(1), calls.count(2)) == (20, 10)


def measure(group: dist.ProcessGroup) -> list[object]:
    def nothing() -> None:
        time.sleep(0.001)

    two = deepep.bench_kineto(nothing, ("dispatch", "combine"), num_tests=2, flush_l2=False)
    halves = deepep.bench_kineto(nothing, "combine", 2, num_kernels_per_period=2)
    domains = deepep.get_physical_domain_size(group), deepep.get_logical_domain_size(group, False)
    return [len(two), all(one >= 0.001 for one in two), len(halves), *domains]


@pytest.mark.processes
def test_ranks_measure_and_know_their_domains(processes: Pools) -> None:
    assert processes(2).run(measure) == [[2, True, 2, (1, 2), (1, 2)]] * 2


def collect(group: dist.ProcessGroup) -> tuple[list[float], list[float]]:
    """What gloo refuses, and NCCL takes."""
    mine = torch.full((2, 2), float(group.rank())).to(torch.float8_e4m3fn)
    gathered = torch.empty(group.size(), 2, 2, dtype=mine.dtype)
    deepep.as_bytes(dist.all_gather_into_tensor, flatten=True)(gathered, mine, group=group)
    swapped = torch.empty_like(mine)
    deepep.as_bytes(dist.all_to_all_single, flatten=False)(swapped, mine, group=group)
    return gathered.float().mean((1, 2)).tolist(), swapped.float()[:, 0].tolist()


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
def test_collectives_take_what_nccls_take(processes: Pools) -> None:
    assert processes(2).run(collect) == [([0.0, 1.0], [0.0, 1.0])] * 2
