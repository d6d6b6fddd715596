"""An exchange that peers may break, and a rank that is killed once it has stopped itself."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import tokenyard


def exchange(buffer: tokenyard.Buffer) -> tokenyard.Handle:
    topk_idx = torch.arange(6).reshape(6, 1)
    got: Any = buffer.dispatch(
        torch.ones(6, 8), topk_idx=topk_idx, topk_weights=torch.ones(6, 1), num_experts=6
    )
    buffer.combine(got.recv_x, got.handle)
    return got.handle


def kill_once_stopped(pid: int, after: float) -> None:
    """Wait until the process has stopped itself, wait `after` seconds, and kill it. A process that
    ends before is left to its test.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.05)
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
