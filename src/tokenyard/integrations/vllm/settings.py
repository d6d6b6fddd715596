"""What the environment says. Read here, and nowhere else."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The plugin's settings, each a variable of the environment."""

    enabled: bool  # TOKENYARD_VLLM, 0 switches the plugin off
    transport: str  # TOKENYARD_VLLM_TRANSPORT, of tokenyard.Buffer
    timeout: float  # TOKENYARD_VLLM_TIMEOUT, seconds without progress until PeerTimeout


def read() -> Settings:
    """The default timeout is torch.distributed's: a rank may load or compile for minutes while
    others wait. A rank that dies is noticed at once, whatever the timeout.
    """
    enabled = os.environ.get("TOKENYARD_VLLM", "1")
    timeout = os.environ.get("TOKENYARD_VLLM_TIMEOUT", "1800")
    if enabled not in ("0", "1"):
        raise ValueError(f"TOKENYARD_VLLM is {enabled!r}, want 0 or 1")
    try:
        seconds = float(timeout)
    except ValueError:
        raise ValueError(f"TOKENYARD_VLLM_TIMEOUT is {timeout!r}, want seconds") from None
    return Settings(
        enabled=enabled == "1",
        transport=os.environ.get("TOKENYARD_VLLM_TRANSPORT", "auto"),
        timeout=seconds,
    )
