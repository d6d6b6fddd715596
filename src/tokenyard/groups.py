"""The group of this run: that of its launcher, or one rank where there is no launcher."""

from __future__ import annotations

import atexit
import errno
import os
from typing import TYPE_CHECKING

from tokenyard.comm.loopback import LoopbackGroup, LoopbackWorld
from tokenyard.runtime.interrupts import shorten_tracebacks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NO_THREADS = (
    "torch.distributed cannot start its threads: raise this user's limit with `ulimit -u`, or the "
    "container's with `docker run --pids-limit`"
)


def local_group() -> ProcessGroup | LoopbackGroup:
    """A torch.distributed group for `Buffer`, however the script was started.

    The default group where there is one. Under torchrun, or another launcher that sets RANK and
    WORLD_SIZE, all its ranks over gloo. Else this process alone: plain `python`, or a notebook. A
    group that is made here becomes the default group, and is destroyed when the process ends.

    For several ranks in one process see `tokenyard.testing.run_virtual`.
    """
    shorten_tracebacks()
    # Not at the top: torch.distributed is not there on every build of torch.
    import torch.distributed as dist

    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            try:
                dist.init_process_group("gloo")
            except RuntimeError as error:
                if os.strerror(errno.EAGAIN) in str(error):
                    raise RuntimeError(_NO_THREADS) from error
                raise
        else:
            try:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            except RuntimeError:  # no network, not even within the machine
                return LoopbackWorld(1).group(0)
        atexit.register(_destroy)
    group = dist.group.WORLD
    assert group is not None
    return group


def _destroy() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
