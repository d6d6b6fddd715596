"""The kernel sets that can run here, for tests that are parametrised by set."""

from __future__ import annotations

import pytest

from tokenyard import kernels

NAMES = kernels.available()


def _mark(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.triton) if name == "triton" else name


SETS = [_mark(name) for name in NAMES]
BUT_REFERENCE = [_mark(name) for name in NAMES if name != "reference"]
FOR_CPUS = [name for name in NAMES if name != "triton"]  # its interpreter takes minutes for much
