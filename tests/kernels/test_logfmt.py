"""LogFMT: every kernel set against `spec`, bit for bit, and against exact arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.cases.kernel_sets import FOR_CPUS
from tokenyard import kernels, spec
from tokenyard.spec.logfmt import exp2
from tokenyard.testing import assert_same
from tokenyard.wire.logfmt import log2_table


def rows(hidden: int) -> Tensor:
    """Rows with blocks that are cast and blocks that are not, and what is special in them."""
    torch.manual_seed(hidden)
    scale = torch.tensor([1e-3, 0.1, 0.2, 3.0, 1e-30, 1e-38, 0.05, 0.1, 0.1, 0.1, 0.1])
    made = torch.randn(len(scale), hidden) * scale[:, None]
    made[6] = 0
    made[7, ::3] = 0
    made[8, 5], made[9, 70] = float("nan"), float("inf")
    made[10] = torch.exp2(-torch.arange(hidden) % 120 - 1.0)  # farther apart than 32 powers of two
    made[0, :128] = 0.125  # all alike: the block is not cast
    made[1, :64] *= -1
    return made.bfloat16()


@pytest.mark.parametrize("name", FOR_CPUS)
@pytest.mark.parametrize("hidden", [512, 1024, 1536, 7168])
def test_sets_agree(name: str, hidden: int) -> None:
    y = rows(hidden)
    want = torch.stack([spec.logfmt(row) for row in y])
    out = torch.full(y.shape, 7.0)
    kernels.load(name).logfmt(y, out)
    assert_same(out, want, "decoded")


def test_what_is_kept() -> None:
    """Within half a step of the logarithm where a block is cast, and all of it elsewhere."""
    y = torch.randn(4, 2048) * 0.1
    y[3] *= 100
    y = y.bfloat16()
    got = torch.stack([spec.logfmt(row) for row in y])
    assert torch.equal(got[3], y[3].float())
    error = (got[:3] - y[:3].float()).abs() / y[:3].float().abs().clamp(min=1e-9)
    assert float(error[y[:3] != 0].quantile(0.5)) > 1e-4  # something is lost
    assert float(error[y[:3] != 0].max()) < 0.023  # at most half of 32 / 510 powers of two


def test_logarithms_and_powers_are_right() -> None:
    table = torch.from_numpy(log2_table())
    magnitudes = (torch.arange(1 << 15, dtype=torch.int32) << 16).view(torch.float32).tolist()
    finite = [place for place, one in enumerate(magnitudes) if math.isfinite(one) and one > 0]
    want = torch.tensor([math.log2(magnitudes[place]) for place in finite], dtype=torch.float32)
    assert torch.equal(table[finite], want)
    assert table[0] == -math.inf
    for place in range(0, 40_000):
        power = -place / 999
        assert math.isclose(exp2(power), 2.0**power, rel_tol=1e-14)
