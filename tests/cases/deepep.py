"""DeepEP's own tests, byte for byte as they are, on CPUs through the importable `deep_ep`.

They are not part of this repository: DEEP_EP_SOURCE names a checkout of DeepEP, or one lies beside
this repository, in shared/third_party.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cases.package import SOURCE
from tests.cases.programs import free_port, run_python
from tokenyard.compat import deep_ep_path

_BESIDE = Path(__file__).parents[3] / "shared" / "third_party" / "DeepEP"
CHECKOUT = Path(os.environ.get("DEEP_EP_SOURCE", _BESIDE))

needs_checkout = pytest.mark.skipif(
    not (CHECKOUT / "tests").is_dir(),
    reason="DeepEP's tests are not at hand: DEEP_EP_SOURCE names no checkout, none lies beside",
)


def run_file(name: str, num_processes: int, *options: str, limit: float = 250) -> str:
    """What a file of DeepEP's tests prints, and says when all its ranks ended well."""
    done = run_python(
        str(CHECKOUT / "tests" / name),
        "--num-processes",
        str(num_processes),
        *options,
        limit=limit,
        DEEP_EP_SOURCE=str(CHECKOUT),
        MASTER_PORT=str(free_port()),
        PYTHONPATH=os.pathsep.join((str(SOURCE), str(deep_ep_path.folder()))),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
