"""What the environment says about the plugin."""

from __future__ import annotations

from dataclasses import dataclass

from tokenyard.runtime import variables

_TIMEOUT = 1800.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The plugin's settings, each a variable of the environment."""

    enabled: bool  # TOKENYARD_VLLM, 0 switches the plugin off
    transport: str  # TOKENYARD_VLLM_TRANSPORT, of tokenyard.Buffer
    timeout: float | None  # seconds without progress until PeerTimeout; None: TOKENYARD_TIMEOUT's
    balance: float | str | None = None  # TOKENYARD_VLLM_BALANCE, of tokenyard.Buffer


def read() -> Settings:
    """Without TOKENYARD_TIMEOUT the timeout is torch.distributed's: a rank may load or compile for
    minutes while others wait. A rank that dies is noticed at once, whatever the timeout.
    """
    from tokenyard.transports import check_name  # wants torch

    enabled = variables.read("TOKENYARD_VLLM")
    if enabled not in ("0", "1"):
        raise ValueError(f"TOKENYARD_VLLM is {enabled!r}, want 0 or 1")
    transport = variables.read("TOKENYARD_VLLM_TRANSPORT")
    check_name(transport, "TOKENYARD_VLLM_TRANSPORT: ")
    return Settings(
        enabled=enabled == "1",
        transport=transport,
        balance=_balance(variables.read("TOKENYARD_VLLM_BALANCE")),
        timeout=None if variables.is_set("TOKENYARD_TIMEOUT") else _TIMEOUT,
    )


def _balance(given: str) -> float | str | None:
    """
    >>> _balance(""), _balance("exact"), _balance("0.05")
    (None, 'exact', 0.05)
    """
    from tokenyard import validate  # wants torch

    if given in ("", "exact"):
        return given or None
    try:
        return validate.balance(float(given))
    except ValueError:
        raise ValueError(
            f"TOKENYARD_VLLM_BALANCE is {given!r}, want exact, or a number, the slack"
        ) from None
