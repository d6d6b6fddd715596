"""tokenyard against bare MPI: Alltoallv of rows that are packed already, same sizes, same run.

    apt-get install openmpi-bin libopenmpi-dev && pip install mpi4py
    mpirun --oversubscribe -n 2 python benchmarks/mpi.py --tokens 4096

MPI moves bytes between buffers that exist; tokenyard's dispatch counts, allocates and gathers too.
The medians over rounds of the slowest rank. What MPI delivers is compared with dispatch first.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import tokenyard
from tokenyard.testing import numbered_tokens, routing

NUM_TOPK, NUM_EXPERTS = 8, 64


def milliseconds(world: Any, call: Callable[[], object], repeat: int) -> float:
    from mpi4py import MPI

    times = []
    for _ in range(repeat + 1):
        world.Barrier()
        start = time.perf_counter()
        call()
        times.append(world.allreduce(time.perf_counter() - start, MPI.MAX))
    return statistics.median(times[1:]) * 1e3


def starts(counts: list[int]) -> list[int]:
    return [sum(counts[:rank]) for rank in range(len(counts))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    from mpi4py import MPI  # after the options, so that --help works without it

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    path = world.bcast(tempfile.mktemp() if rank == 0 else None)
    store = dist.FileStore(path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    x = numbered_tokens(args.tokens, args.hidden, first=rank * args.tokens)
    topk_idx, weights = routing("uniform", args.tokens, NUM_TOPK, NUM_EXPERTS, seed=rank)
    with tokenyard.Buffer(dist.group.WORLD) as buffer:

        def dispatch() -> tokenyard.buffer.Dispatched:
            return buffer.dispatch(
                x, topk_idx=topk_idx, topk_weights=weights, num_experts=NUM_EXPERTS
            )

        got: Any = dispatch()
        route, width = got.handle.flow.route, args.hidden * x.element_size()
        packed = x[route.send_token.long()].view(torch.uint8).numpy()
        received = torch.zeros(got.recv_x.shape, dtype=x.dtype).view(torch.uint8).numpy()
        row = MPI.BYTE.Create_contiguous(width).Commit()
        sent, arrive = list(route.send_counts), list(got.handle.flow.recv_counts)
        out = [packed, (sent, starts(sent)), row]
        into = [received, (arrive, starts(arrive)), row]
        world.Alltoallv(out, into)
        same = torch.equal(torch.from_numpy(received).view(x.dtype), got.recv_x)
        assert same, "what MPI delivers differs from dispatch"

        shared = buffer.get_next_combine_buffer(got.handle).copy_(got.recv_x)
        figures = {
            "MPI Alltoallv": milliseconds(world, lambda: world.Alltoallv(out, into), args.repeat),
            "dispatch": milliseconds(world, dispatch, args.repeat),
            "combine": milliseconds(world, lambda: buffer.combine(shared, got.handle), args.repeat),
        }
    if rank == 0:
        print(f"{size} ranks, {args.tokens} tokens a rank, {received.nbytes / 1e6:.0f} MB received")
        for name, figure in figures.items():
            faster = figures["MPI Alltoallv"] / figure
            print(f"  {name:14s} {figure:7.1f} ms   {faster:.1f} times as fast as MPI")
    world.Barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
