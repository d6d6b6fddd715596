"""Predictions of this library's own exchanges, against the exchanges."""

from __future__ import annotations

import pytest

from tools import own_runs

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_exchanges_in_a_node_take_what_was_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    """Within 50 %: the machine may have other work. On an idle one they come to 20 %."""
    own_runs.run_in_node()
    took = [line for line in capsys.readouterr().out.splitlines() if "took" in line]
    errors = [float(line.rsplit(":", 1)[1].rstrip("%")) for line in took]
    assert len(errors) == 3
    assert max(map(abs, errors)) < 50.0, took
