"""Pairs of dispatch and combine over MPI and over gloo, beside bare Alltoallv of the same rows.

    mpiexec -n 2 python benchmarks/mpi.py --tokens 1 16 64 1024

Between machines give --address, that of rank 0 on their network. MPI moves bytes between buffers
that exist, there and back; tokenyard's calls agree, count, allocate and gather too. Rounds of all
take turns; the figures are medians over them of the slowest rank.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

import tokenyard
from tokenyard.testing import numbered_tokens, routing

NUM_TOPK, NUM_EXPERTS = 8, 64


def bare(world: Any, counts: list[int], width: int) -> Callable[[], object]:
    """An Alltoallv of so many rows for each rank, and one of the rows that came back to them."""
    from mpi4py import MPI

    come = world.alltoall(counts)
    row = MPI.BYTE.Create_contiguous(width).Commit()

    def side(numbers: list[int]) -> list[Any]:
        memory = torch.zeros(max(1, sum(numbers) * width), dtype=torch.uint8).numpy()
        return [memory, (numbers, list(accumulate(numbers, initial=0))[:-1]), row]

    here, there = side(counts), side(come)

    def pair() -> None:
        world.Alltoallv(here, there)
        world.Alltoallv(there, here)

    return pair


def pair_of(buffer: tokenyard.Buffer, given: dict[str, Any]) -> Callable[[], object]:
    def pair() -> None:
        got: Any = buffer.dispatch(**given, num_experts=NUM_EXPERTS)
        buffer.combine(got.recv_x, got.handle)

    return pair


def medians(
    world: Any, calls: dict[str, Callable[[], object]], repeat: int
) -> dict[str, tuple[float, float]]:
    """By name the microseconds of the slowest rank: their median and the least."""
    from mpi4py import MPI

    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeat + 2):
        for name, call in calls.items():
            for _ in range(3):  # the first after another's is not counted
                world.Barrier()
                begin = time.perf_counter()
                call()
                last = time.perf_counter() - begin
            times[name].append(1e6 * world.allreduce(last, MPI.MAX))
    return {name: (statistics.median(some[2:]), min(some[2:])) for name, some in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 1024], help="a rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--transport", default="hierarchical")
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--address", default="127.0.0.1", help="of rank 0, for gloo")
    parser.add_argument("--port", type=int, default=29511)
    args = parser.parse_args()
    from mpi4py import MPI  # after the options, so that --help works without it

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    dist.init_process_group(
        "gloo", init_method=f"tcp://{args.address}:{args.port}", rank=rank, world_size=size
    )
    options = {"transport": args.transport, "ranks_per_node": args.ranks_per_node}
    with (
        tokenyard.Buffer(comm=world, **options) as over_mpi,
        tokenyard.Buffer(dist.group.WORLD, **options) as over_gloo,
    ):
        for tokens in args.tokens:
            x = numbered_tokens(tokens, args.hidden, first=rank * tokens)
            topk_idx, weights = routing("uniform", tokens, NUM_TOPK, NUM_EXPERTS, seed=rank)
            given = {"x": x, "topk_idx": topk_idx, "topk_weights": weights}
            counts = over_mpi.get_dispatch_layout(topk_idx, NUM_EXPERTS).num_tokens_per_rank
            calls = {
                "Alltoallv": bare(world, counts.tolist(), 2 * args.hidden),
                "over MPI": pair_of(over_mpi, given),
                "over gloo": pair_of(over_gloo, given),
            }
            found = medians(world, calls, max(5, args.repeat // (1 + tokens // 256)))
            if rank == 0:
                (least, _), (ours, _), (gloo, _) = found.values()
                print(f"{tokens:5d} tokens a rank, {size} ranks: ", end="")
                print(", ".join(f"{name} {one:.0f} us" for name, (one, _) in found.items()), end="")
                print(f"; over MPI {ours / least:.2f} of Alltoallv, gloo {gloo / ours:.2f} of it")
    world.Barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
