"""Dispatch and combine between nodes with a network of limited rate, against gloo, in one run.

    python benchmarks/internode.py                      # root: 2 nodes of 2 ranks, 1 Gbit/s each
    python benchmarks/internode.py --nodes 4 --tokens 512

Nodes are network namespaces (tokenyard.testing.Cluster). "gloo, the same bytes" is a bare
all_to_all_single of as many bytes as dispatch sends between nodes, between the same ranks: no
counting, no gathering, no forwarding. "nothing enclosed" is the way of calls whose rows are too
many to travel with the agreement's words. "pairs" sends every (token, expert) pair, as
benchmarks/per_expert.py describes. A figure is the median over rounds of the slowest rank. Results
are compared first, and bytes are those that the interfaces count.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from per_expert import PerExpert  # type: ignore[import-not-found]

import tokenyard
from tokenyard.testing import Cluster, numbered_tokens, routing
from tokenyard.transports.hierarchical import enclosed

NUM_TOPK, NUM_EXPERTS = 8, 64


class Bench:
    """What one rank keeps between the parts of the run."""

    def __init__(self, group: Any, num_tokens: int, hidden: int, sizes: list[int]) -> None:
        rank = group.rank()
        self.x = numbered_tokens(num_tokens, hidden, first=rank * num_tokens)
        self.topk_idx, self.weights = routing(
            "uniform", num_tokens, NUM_TOPK, NUM_EXPERTS, seed=rank
        )
        self.buffer = tokenyard.Buffer(group, transport="hierarchical", ranks_per_node=sizes)
        self.flat = tokenyard.Buffer(group, transport="collective", ranks_per_node=sizes)
        with patch.object(enclosed, "MOST_ENCLOSED", 0):
            self.rounds = tokenyard.Buffer(group, transport="hierarchical", ranks_per_node=sizes)
        self.pairs = PerExpert(group, self.x, self.topk_idx, NUM_EXPERTS)
        self.dispatch()  # in which ranks hear how much they will enclose
        self.got, self.got_in_rounds = self.dispatch(), self.dispatch_in_rounds()
        self.prepare_gloo(rank, sizes)

    def dispatch(self) -> Any:
        return self.buffer.dispatch(
            self.x, topk_idx=self.topk_idx, topk_weights=self.weights, num_experts=NUM_EXPERTS
        )

    def dispatch_in_rounds(self) -> Any:
        return self.rounds.dispatch(
            self.x, topk_idx=self.topk_idx, topk_weights=self.weights, num_experts=NUM_EXPERTS
        )

    def combine_in_rounds(self) -> Any:
        return self.rounds.combine(self.got_in_rounds.recv_x, self.got_in_rounds.handle)

    def dispatch_flat(self) -> Any:
        return self.flat.dispatch(
            self.x, topk_idx=self.topk_idx, topk_weights=self.weights, num_experts=NUM_EXPERTS
        )

    def combine(self) -> Any:
        return self.buffer.combine(self.got.recv_x, self.got.handle)

    def check(self) -> None:
        flat = self.dispatch_flat()
        assert torch.equal(flat.recv_x, self.got.recv_x), "transports differ"
        assert torch.equal(self.dispatch().recv_x, self.got.recv_x), "rows that are enclosed differ"
        combined = self.flat.combine(flat.recv_x, flat.handle)
        for _ in range(2):  # in the first, ranks hear what they will enclose
            assert torch.equal(combined.x, self.combine().x), "transports differ in combine"
        rows, _ = self.pairs.dispatch()
        assert len(rows) == sum(self.got.num_recv_tokens_per_expert_list), "pairs differ"

    def prepare_gloo(self, rank: int, sizes: list[int]) -> None:
        """Records for the partner in each node, as many as dispatch sends there."""
        layout = self.buffer.get_dispatch_layout(self.topk_idx, NUM_EXPERTS)
        record = self.x.shape[1] * 2 + NUM_TOPK * (8 + 4) + 4
        node, place = divmod(rank, sizes[0])
        counts = [0] * sum(sizes)
        for other, tokens in enumerate(layout.num_tokens_per_rdma_rank.tolist()):
            if other != node:
                counts[other * sizes[0] + place] = tokens
        self.sent = torch.zeros(sum(counts), record, dtype=torch.uint8)
        told = torch.tensor(counts)
        heard = torch.empty_like(told)
        dist.all_to_all_single(heard, told)
        self.counts, self.out_counts = counts, heard.tolist()
        self.out = torch.zeros(sum(self.out_counts), record, dtype=torch.uint8)

    def gloo(self) -> None:
        dist.all_to_all_single(self.out, self.sent, self.out_counts, self.counts)


bench: Bench


def prepare(group: Any, *sizes: Any) -> None:
    global bench
    bench = Bench(group, *sizes)
    bench.check()


def measure(group: Any, name: str, repeat: int) -> list[float]:
    """The slowest rank's time in each round."""
    call: Callable[[], Any] = getattr(bench.pairs if name == "pairs" else bench, CALLS[name])
    times = []
    for _ in range(repeat):
        dist.barrier()
        start = time.perf_counter()
        call()
        spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        times.append(spent.item())
    return times


CALLS = {
    "gloo, the same bytes": "gloo",
    "hierarchical dispatch": "dispatch",
    "hierarchical combine": "combine",
    "dispatch, nothing enclosed": "dispatch_in_rounds",
    "combine, nothing enclosed": "combine_in_rounds",
    "collective dispatch": "dispatch_flat",
    "pairs": "dispatch",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each node")
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--rate", default="1gbit", help="of each node, as tc has it")
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    sizes = [args.ranks] * args.nodes
    times: dict[str, list[float]] = {name: [] for name in CALLS}
    megabytes: dict[str, float] = {}
    with Cluster(sizes, rate=args.rate, timeout=600) as cluster:
        cluster.run(prepare, args.tokens, args.hidden, sizes)
        for _ in range(args.repeat):  # one after the other, so that all see the same machine
            for name in CALLS:
                before = cluster.bytes_sent()[0]
                times[name] += cluster.run(measure, name, 1)[0]
                megabytes[name] = (cluster.bytes_sent()[0] - before) / 1e6
    floor = statistics.median(times["gloo, the same bytes"])
    print(f"{args.nodes} nodes of {args.ranks} ranks at {args.rate}, {args.tokens} tokens a rank\n")
    print("| | median, ms | spread, ms | MB that node 0 sent | of gloo |\n|---|---|---|---|---|")
    for name, spent in times.items():
        low, middle, high = statistics.quantiles(spent, n=4)
        print(
            f"| {name} | {middle * 1e3:.3g} | {(high - low) / 2 * 1e3:.2g} "
            f"| {megabytes[name]:.1f} | {middle / floor:.2f} |"
        )


if __name__ == "__main__":
    # Functions of a module keep what they made from call to call, those of a program do not.
    import internode  # type: ignore[import-not-found]

    internode.main()
