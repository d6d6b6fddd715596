"""The part of tokenyard.Buffer that is about hardware: names of DeepEP that mean little on CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.engine import Engine
from tokenyard.runtime.events import EventHandle, EventOverlap
from tokenyard.types import Config


@cache
def _config(num_sms: int) -> Config:
    return Config(num_sms)


class Hardware:
    """Names of DeepEP that are about GPUs, and what they say without any."""

    num_sms: int = 20
    num_nvl_bytes: int
    num_rdma_bytes: int
    _open_engine: Callable[[], Engine]

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """DeepEP's knob for all Buffers: Config.num_sms where a caller gives no Config.

        A Buffer keeps the number that it was opened with.
        """
        validate.require(
            type(new_num_sms) is int and new_num_sms >= 2 and new_num_sms % 2 == 0,
            f"new_num_sms is {new_num_sms!r}, want an even number of at least 2",
        )
        cls.num_sms = new_num_sms

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """A Config that works for any number of ranks."""
        return _config(cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """A Config for combine, as get_dispatch_config gives one for dispatch."""
        return _config(cls.num_sms)

    @cached_property
    def _scratch(self) -> dict[bool, Tensor]:
        """Made when it is asked for: of num_nvl_bytes, or of num_rdma_bytes."""
        return {}

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: callers ask this to learn whether FP8 and any number of ranks will do."""
        return True

    @staticmethod
    def capture() -> EventOverlap:
        """An event that is over when all work submitted so far is."""
        return EventOverlap(EventHandle())

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: Sequence[int] | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Memory of num_nvl_bytes, or of num_rdma_bytes, from byte `offset` on.

        In DeepEP it is the memory that calls use. Here no call uses it: write to it as you like.
        """
        device = self._open_engine().device
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        validate.integer("offset", offset, at_least=0, at_most=num_bytes)
        validate.require(
            offset % dtype.itemsize == 0,
            f"offset is {offset}, want a multiple of {dtype.itemsize}, the bytes of {dtype}",
        )
        if use_rdma_buffer not in self._scratch:
            made = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._scratch[use_rdma_buffer] = made
        count = (num_bytes - offset) // dtype.itemsize
        memory = self._scratch[use_rdma_buffer][offset : offset + count * dtype.itemsize]
        elements = memory.view(dtype)
        if size is None:
            return elements
        wanted = torch.Size(size)
        validate.require(
            wanted.numel() <= count,
            f"size is {tuple(wanted)}, want at most {count} elements of {dtype}: there are "
            f"{num_bytes} bytes from offset {offset} on",
        )
        return elements[: wanted.numel()].view(wanted)
