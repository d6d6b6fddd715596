"""tokenyard's FP8 casts against the same in torch operations, one thread, in one run.

    python benchmarks/fp8.py

Results are compared before anything is timed, bit for bit. Medians, and half the distance between
quartiles.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tokenyard import per_token_cast_back, per_token_cast_to_fp8

HIDDEN = 7168
REPEAT = {1: 501, 128: 51, 4096: 7}  # by tokens


def to_fp8_in_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.view(x.shape[0], -1, 128)
    amax = groups.abs().float().amax(dim=2).clamp(1e-4)
    values = (groups * (448.0 / amax.unsqueeze(2))).to(torch.float8_e4m3fn)
    return values.view(x.shape), amax / 448.0


def back_in_torch(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    groups = x_fp8.float().view(x_fp8.shape[0], -1, 128)
    return (groups * x_scales.unsqueeze(2)).view(x_fp8.shape).bfloat16()


def microseconds(call: Callable[[], object], repeat: int) -> tuple[float, float]:
    call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, (high - low) / 2


def same(got: Tensor, want: Tensor) -> bool:
    return got.dtype == want.dtype and torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def main() -> None:
    torch.set_num_threads(1)
    print("| cast | tokens | torch, us | tokenyard, us | times faster |")
    print("|---|---|---|---|---|")
    for tokens, repeat in REPEAT.items():
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
        pair = per_token_cast_to_fp8(x)
        assert all(map(same, pair, to_fp8_in_torch(x)))
        assert same(per_token_cast_back(*pair), back_in_torch(*pair))
        for name, ours, theirs, args in (
            ("to FP8", per_token_cast_to_fp8, to_fp8_in_torch, (x,)),
            ("back", per_token_cast_back, back_in_torch, pair),
        ):
            slow, slow_spread = microseconds(lambda: theirs(*args), repeat)  # noqa: B023
            fast, fast_spread = microseconds(lambda: ours(*args), repeat)  # noqa: B023
            print(
                f"| {name} | {tokens} | {slow:.0f} ± {slow_spread:.0f} "
                f"| {fast:.1f} ± {fast_spread:.1f} | {slow / fast:.1f} |"
            )


if __name__ == "__main__":
    main()
