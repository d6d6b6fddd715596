"""Raising signals in other ranks' memory, and waiting for theirs: never for ever."""

from __future__ import annotations

import numpy as np
from numba import njit

from tokenyard.kernels.numba.atomics import fence_stores, load_acquire, pause, store_release


@njit(nogil=True, cache=True)
def _raise_kernel(addresses, epoch):
    fence_stores()
    for i in range(addresses.shape[0]):
        store_release(addresses[i], epoch)


def raise_signals(addresses: np.ndarray, epoch: int) -> None:
    """Everything that this thread wrote comes before the signals, streaming stores included."""
    _raise_kernel(addresses, epoch)


@njit(nogil=True, cache=True)
def _await_kernel(addresses, epoch, first, patience):
    for i in range(first, addresses.shape[0]):
        for _ in range(patience):
            if load_acquire(addresses[i]) >= epoch:
                break
            pause()
        else:
            return i
    return addresses.shape[0]


def await_signals(addresses: np.ndarray, epoch: int, first: int, patience: int) -> int:
    """Wait for signals first.. to reach the epoch, each for at most `patience` pauses.

    Returns the place of the first that has not: whoever called decides whether to go on waiting.
    """
    return _await_kernel(addresses, epoch, first, patience)
