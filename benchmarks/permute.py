"""permute and unpermute against a memcpy of the rows they move, one thread, in one run.

    python benchmarks/permute.py [--rows 4096] [--hidden 7168] [--local 2]

Each row has so many local experts of the 8 it chose. The memcpy copies every permuted row twice,
once for each way, into memory that was written before. torch is index_select, and index_select with
weights and a sum in float32; the gradients are those of unpermute's rows and weights. Results are
compared before anything is timed. Medians, and half the distance between quartiles; ratios are
medians of those of single rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import tokenyard
from tokenyard.ops.permute import unpermute_backward

TOPK, EXPERTS = 8, 8


def routed(num_rows: int, num_local: int) -> Tensor:
    """[N, 8] local ids, num_local of them here, the others elsewhere."""
    topk_idx = torch.full((num_rows, TOPK), -1)
    place = torch.rand(num_rows, TOPK).topk(num_local).indices
    return topk_idx.scatter_(1, place, torch.rand(num_rows, EXPERTS).topk(num_local).indices)


def torch_there(x: Tensor, topk_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids, order = topk_idx.flatten().sort(stable=True)
    pairs = order[ids >= 0]
    row_of = torch.full((topk_idx.numel(),), -1)
    row_of[pairs] = torch.arange(len(pairs))
    ends = torch.bincount(ids[ids >= 0], minlength=EXPERTS).cumsum(0).int()
    return x.index_select(0, pairs // TOPK), row_of.view(topk_idx.shape), ends


def torch_back(y: Tensor, row_of: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros(len(row_of), y.shape[1])
    for k, places in enumerate(row_of.unbind(1)):
        (rows,) = (places >= 0).nonzero(as_tuple=True)
        total.index_add_(0, rows, weights[rows, k, None] * y.index_select(0, places[rows]))
    return total.to(y.dtype)


def torch_gradients(
    grad: Tensor, y: Tensor, row_of: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    rows, k = (row_of >= 0).nonzero(as_tuple=True)
    places = row_of[rows, k]
    grad_y, grad_weights = torch.zeros_like(y), torch.zeros_like(weights)
    terms = grad.index_select(0, rows).float()
    grad_y[places] = (weights[rows, k, None] * terms).to(y.dtype)
    grad_weights[rows, k] = (terms * y.index_select(0, places)).sum(1)
    return grad_y, grad_weights


def milliseconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """All of them in turn, so that what else the machine does hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--local", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(args.rows, args.hidden).bfloat16()
    topk_idx, weights = routed(args.rows, args.local), torch.rand(args.rows, TOPK)
    num_moved = args.rows * args.local
    there, back = x.new_zeros(num_moved, args.hidden), torch.zeros_like(x)
    source, target = torch.zeros_like(there), torch.zeros_like(there)

    def ours() -> Tensor:
        got = tokenyard.permute(x, topk_idx, EXPERTS)
        return tokenyard.unpermute(got.x, got.row_of, weights=weights)

    def ours_into() -> Tensor:
        got = tokenyard.permute(x, topk_idx, EXPERTS, out=there)
        return tokenyard.unpermute(got.x, got.row_of, weights=weights, out=back)

    def theirs() -> Tensor:
        rows, row_of, _ = torch_there(x, topk_idx)
        return torch_back(rows, row_of, weights)

    got = tokenyard.permute(x, topk_idx, EXPERTS)
    for mine, other in zip((got.x, got.row_of, got.offsets), torch_there(x, topk_idx)):
        assert torch.equal(mine, other)
    assert torch.equal(ours(), theirs())
    assert torch.equal(ours_into(), theirs())
    assert torch.equal(there, got.x)
    needed = x, got.x, got.row_of, weights
    for mine, other in zip(unpermute_backward(*needed), torch_gradients(*needed)):
        torch.testing.assert_close(mine, other)

    times = milliseconds(
        {
            "memcpy of the rows, twice": lambda: (target.copy_(source), target.copy_(source)),
            "permute": lambda: tokenyard.permute(x, topk_idx, EXPERTS),
            "permute, out=": lambda: tokenyard.permute(x, topk_idx, EXPERTS, out=there),
            "unpermute": lambda: tokenyard.unpermute(got.x, got.row_of, weights=weights),
            "unpermute, out=": lambda: tokenyard.unpermute(
                got.x, got.row_of, weights=weights, out=back
            ),
            "both": ours,
            "both, out=": ours_into,
            "both, torch": theirs,
            "gradients": lambda: unpermute_backward(*needed),
            "gradients, torch": lambda: torch_gradients(*needed),
        },
        args.rounds,
    )
    base = times["memcpy of the rows, twice"]
    what = f"{args.rows} rows of {args.hidden} bfloat16, {args.local} local experts each"
    print(f"{what}: {2 * there.nbytes / 1e6:.0f} MB")
    print("| | ms | of the memcpy |")
    print("|---|---|---|")
    for name, took in times.items():
        low, middle, high = statistics.quantiles(took, n=4)
        ratio = statistics.median(mine / copy for mine, copy in zip(took, base))
        print(f"| {name} | {middle:.1f} ± {(high - low) / 2:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
