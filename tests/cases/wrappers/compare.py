"""How a run on many ranks is compared with that of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

Outcome = tuple[list[float], dict[str, Tensor]]  # losses, and parameters after the last step


def assert_like_one_process(results: list[Outcome], want: Outcome, within: float) -> None:
    """The mean of all ranks' losses at each step, and all parameters; those that all have are equal
    to the bit.
    """
    want_losses, want_parameters = want
    losses = [sum(step) / len(results) for step in zip(*(losses for losses, _ in results))]
    assert losses == pytest.approx(want_losses, abs=within, rel=within)
    if want_losses:  # one stage of a pipeline has none
        assert abs(want_losses[-1] - want_losses[0]) > 10 * within, "nothing was learnt"
    assert set().union(*(named for _, named in results)) == set(want_parameters)
    first = results[0][1]
    for _, named in results:
        for name, value in named.items():
            wanted = want_parameters[name]
            assert torch.allclose(value, wanted, atol=within, rtol=within), name
            assert name not in first or torch.equal(value, first[name]), name
