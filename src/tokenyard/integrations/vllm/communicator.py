"""vLLM's communicator for CPUs, with our all-to-all manager in the place of its own."""

from __future__ import annotations

from typing import Any

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from tokenyard.integrations.vllm.manager import TokenyardAll2AllManager


class TokenyardCommunicator(CpuCommunicator):
    all2all_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.all2all_manager is not None:
            self.all2all_manager = TokenyardAll2AllManager(self.cpu_group)

    def destroy(self) -> None:
        if self.all2all_manager is not None:
            self.all2all_manager.destroy()
            self.all2all_manager = None
        super().destroy()
