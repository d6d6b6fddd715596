"""What DeepEP's own tests need on CPUs: a clock, and a torch in which "cuda" means the CPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.cases.clock import scaled
from tests.cases.package import SOURCE
from tests.cases.processes import Pools
from tests.cases.programs import run_python
from tokenyard.compat import deep_ep_path
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


PROGRAM = """
import os
import torch
import deep_ep
from deep_ep.utils.envs import init_dist

local_rank = int(os.environ["LOCAL_RANK"])
rank, size, group = init_dist(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
torch.cuda.set_device(local_rank)
side = torch.cuda.Stream(priority=-1)
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    x = torch.full((4, 128), float(rank), device="cuda")
x.record_stream(side)
side.record_event().synchronize()
buffer = deep_ep.Buffer(group)
topk_idx = torch.tensor([[0, 1]], device="cuda").expand(4, 2).contiguous()
weights = torch.ones(4, 2, dtype=torch.float)
rows, *_ = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=2)
print(f"rank {rank} of {size}:", rows[:, 0].tolist(), flush=True)
buffer.destroy()
torch.distributed.destroy_process_group()
"""


@pytest.mark.processes
def test_a_program_under_torchrun(tmp_path: Path) -> None:
    """RANK is that of a rank there; and streams, as DeepEP's README uses them."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)),
        PYTHONPATH=os.pathsep.join((str(SOURCE), str(deep_ep_path.folder()))),
        TOKENYARD_TIMEOUT=str(scaled(60)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [0.0] * 4 + [1.0] * 4
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2: {rows}" for rank in (0, 1)]


@pytest.mark.parametrize("given", [(1, 4), (0, 2), (1, 2)])
def test_ranks_that_torchrun_did_not_start(
    monkeypatch: pytest.MonkeyPatch, given: tuple[int, int]
) -> None:
    """A program that spawns its ranks itself, started for each rank: it would wait for ever."""
    started = {"RANK": "4", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"in rank 0 of 4 that torchrun .* want init_dist\(0, 4\)"):
        deepep.init_dist(*given)
