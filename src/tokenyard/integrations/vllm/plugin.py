"""The entry point, which vLLM calls in every process, sometimes more than once.

Mostly there is no configuration yet. So it only replaces the platform's answer to which
communicator to use, which vLLM asks for when worker processes form their groups.
"""

from __future__ import annotations

from typing import Any

from tokenyard.integrations.vllm import settings

TESTED = ((0, 32), (0, 33))  # from, and up to but not including
COMMUNICATOR = "tokenyard.integrations.vllm.communicator.TokenyardCommunicator"


def register() -> None:
    # vLLM called us, so these are loaded already.
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.version import __version__

    # vLLM shows what its own loggers say, and this is one of them by its name.
    log = init_logger("vllm.plugins.tokenyard")
    reason = why_not(settings.read().enabled, current_platform.is_cpu(), __version__)
    if reason is not None:
        log.info_once("tokenyard does nothing: %s", reason)
        return
    hook(type(current_platform), log)


def why_not(enabled: bool, is_cpu: bool, version: str) -> str | None:
    """Why the plugin leaves vLLM alone; None where it may be of use.

    >>> why_not(True, True, "0.31.2")
    'it was tested with vLLM 0.32 up to 0.33, and this is 0.31.2'
    >>> why_not(True, False, "0.32.0")
    'this is not the CPU platform'
    """
    if not enabled:
        return "TOKENYARD_VLLM is 0"
    if not is_cpu:
        return "this is not the CPU platform"
    first, end = TESTED
    if not first <= _release(version) < end:
        from_, to = (".".join(map(str, one)) for one in TESTED)
        return f"it was tested with vLLM {from_} up to {to}, and this is {version}"
    return None


def _release(version: str) -> tuple[int, ...]:
    """
    >>> _release("0.32.0+cpu"), _release("dev")
    ((0, 32), ())
    """
    parts = version.split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


def hook(platform: Any, log: Any) -> None:
    """Let the platform name our communicator where expert parallelism is on."""
    original = platform.get_device_communicator_cls
    if hasattr(original, "tokenyard"):
        return

    def get_device_communicator_cls(cls: Any) -> str:
        if not _expert_parallel():
            log.info_once("tokenyard does nothing: expert parallelism is off")
            return original()
        from tokenyard.integrations.vllm import hooks

        hooks.install()
        return COMMUNICATOR

    get_device_communicator_cls.tokenyard = True  # type: ignore[attr-defined]
    platform.get_device_communicator_cls = classmethod(get_device_communicator_cls)


def _expert_parallel() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and bool(config.parallel_config.enable_expert_parallel)
