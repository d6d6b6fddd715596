"""Faults that `tools.mutants` plants, and the tests that can see them."""

from __future__ import annotations

from tools.faults import around, calls, exchange, training
from tools.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (*calls.FAULTS, *exchange.FAULTS, *training.FAULTS, *around.FAULTS)
