"""Write the table of docs/guide/optimisers.md: `python -m tests.cases.nn.optimiser_table`."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.cases.nn import optimisers as jobs
from tokenyard.testing import Processes, assert_same

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "optimisers.md"
BEGIN, END = "| optimiser | checkpoint |\n|---|---|\n", "\n\nOutcomes"
SAVED_ON, LOADED_ON = 4, (4, 3, 2, 1, 5)

_NUMBER = re.compile(r"\d+\.\d+(e-\d+)?")
WORKS = "works"
ABSOLUTE = {  # tolerances; of all others 1e-6. Runs without a checkpoint differ as much:
    "torch.optim.Muon": 1e-3,  # 8e-5 between 4 ranks and 3; it multiplies in bfloat16
    "torch.optim.RMSprop": 1e-3,  # 3e-3 between 4 ranks and 2, in 5 steps; centered
}
TOGETHER = "works; a step looks at all experts of a rank together"


def outcome(name: str, pools: Any, saved_on: int, loaded_on: tuple[int, ...], path: str) -> str:
    """Of training that is saved and goes on elsewhere; raises where it is not the same."""
    saved = pools[saved_on].run(jobs.save, path, name)
    if isinstance(saved[0], jobs.Refusal):
        assert len(set(saved)) == 1, "ranks refuse differently"
        return f"refused: {saved[0].words}"
    own_refusal = jobs.takes_experts(name)
    together = own_refusal is None and jobs.looks_at_all_experts(name)
    for num_ranks in loaded_on:
        loaded = pools[num_ranks].run(jobs.load, path, name)
        refusals = [one for one in loaded if isinstance(one, jobs.Refusal)]
        if refusals:
            return f"refused when loaded: {_NUMBER.sub('...', refusals[0].words)}"
        _compare([one for one, _ in loaded], [one for one, _ in saved])
        # The order of sums depends on the number of ranks.
        absolute = None if num_ranks == saved_on else ABSOLUTE.get(name, 1e-6)
        if absolute is None or not together:
            _compare([one for _, one in loaded], [one for _, one in saved], absolute)
    if own_refusal is not None:
        return f"works, and takes no experts: {own_refusal.words}"
    return TOGETHER if together else WORKS


def _compare(
    got: list[dict[str, Any]], want: list[dict[str, Any]], absolute: float | None = None
) -> None:
    """To the bit, or with a tolerance."""
    every = {name: value for state in reversed(want) for name, value in state.items()}
    assert set().union(*got) == every.keys()
    for state in got:
        for name, value in state.items():
            if absolute is None or not isinstance(value, Tensor):
                assert_same(value, every[name], name)
            else:
                torch.testing.assert_close(value, every[name], rtol=1e-4, atol=absolute)


def line(name: str, found: str) -> str:
    options = ", ".join(f"{key}={value}" for key, value in jobs.OPTIONS.get(name, {}).items())
    return f"| `{name}{f'({options})' if options else ''}` | {found} |"


def lines_of_page() -> list[str]:
    return PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()


def main() -> None:
    lines = []
    pools = {number: Processes(number, timeout=200) for number in LOADED_ON}
    for name in [*jobs.torch_optimisers(), *jobs.OTHERS]:
        with tempfile.TemporaryDirectory() as path:
            lines.append(line(name, outcome(name, pools, SAVED_ON, LOADED_ON, path)))
        print(lines[-1], flush=True)
    for pool in pools.values():
        pool.close()
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n".join(lines) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
