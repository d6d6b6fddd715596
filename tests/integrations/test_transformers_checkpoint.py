"""Training a transformers model whose experts are spread goes on on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.cases.processes import Pools
from tests.cases.transformers import checkpoint as jobs

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_a_checkpoint_goes_on_on_another_number_of_ranks(tmp_path: Path, processes: Pools) -> None:
    two = processes(2)
    saved = two.run(jobs.train, str(tmp_path), False)
    again = two.run(jobs.train, str(tmp_path), True)
    (one,) = processes(1).run(jobs.train, str(tmp_path), True)
    want = {name: tensor for state in saved for name, tensor in state.items()}
    for number, state in (2, again[0]), (2, again[1]), (1, one):
        assert any(".experts.gate_up_proj." in name for name in state)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, want[name], rtol=1e-3, atol=1e-5 * (number == 1))
    assert one.keys() == want.keys()
