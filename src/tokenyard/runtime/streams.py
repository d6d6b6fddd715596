"""Streams and events of a GPU, behind the names that events have on CPU.

A Buffer of GPU tensors moves rows on a stream of its own, after the work that the current stream
had before the call. A CPU group has no streams and never touches torch.cuda. Tests pass another
`api` with the same names, so that most of these lines run where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard.runtime.completion import Completion
from tokenyard.runtime.events import EventHandle, EventOverlap


class StreamEvent(EventHandle):
    """A moment of a stream. The current stream waits for it; the host does not."""

    def __init__(self, event: Any, api: Any) -> None:
        super().__init__()
        self._event, self._api = event, api

    def current_stream_wait(self) -> None:
        self._api.current_stream().wait_event(self._event)

    @property
    def is_over(self) -> bool:
        return self._event.query()


class Streams:
    def __init__(self, device: torch.device, api: Any) -> None:
        self._api = api
        self.comm = api.Stream(device=device)

    def run(
        self,
        work: Callable[[], None],
        tensors: Iterable[Tensor | None],
        pending: EventHandle | None,
        completion: Completion,
    ) -> EventOverlap:
        """Do the work on the communication stream, after `pending` and, unless results are
        allocated there, after the current stream. `tensors` are those that it reads and writes.
        """
        current = self._api.current_stream()
        if not completion.on_comm_stream:
            self.comm.wait_stream(current)
        with self._api.stream(self.comm):
            if pending is not None:
                pending.current_stream_wait()
            work()
        done = self._record(self.comm)
        if not completion.async_finish:
            current.wait_event(done)
            return EventOverlap(None)
        for tensor in tensors:  # their memory must not be given away while the work goes on
            if tensor is not None:
                self._api.record_stream(tensor, self.comm)
        return EventOverlap(StreamEvent(done, self._api))

    def scope(self, completion: Completion, after_current: bool) -> AbstractContextManager[Any]:
        """A context: tensors made inside belong to the communication stream, if that was asked."""
        if not completion.on_comm_stream:
            return nullcontext()
        if after_current:
            self.comm.wait_stream(self._api.current_stream())
        return self._api.stream(self.comm)

    def _record(self, stream: Any) -> Any:
        event = self._api.Event()
        event.record(stream)
        return event


class _Cuda:
    """torch.cuda, with the one name that it has as a method of tensors."""

    @staticmethod
    def record_stream(tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)  # no GPU has run this

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)  # no GPU has run this


def streams_for(device: torch.device) -> Streams | None:
    """The streams of a device; None for a CPU group."""
    if device.type != "cuda":
        return None
    return Streams(device, _Cuda())  # no GPU has run this


def to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Copy through pinned memory, without waiting."""
    there = torch.from_numpy(numbers)
    if device.type == "cpu":
        return there
    return there.pin_memory().to(device, non_blocking=True)  # no GPU has run this


def to_host(numbers: Tensor) -> np.ndarray:
    """Copy through pinned memory, and wait for this stream alone until the numbers are there."""
    if numbers.device.type == "cpu":
        return numbers.numpy()
    here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)  # no GPU has run this
    here.copy_(numbers, non_blocking=True)  # no GPU has run this
    torch.cuda.current_stream(numbers.device).synchronize()  # no GPU has run this
    return here.numpy()  # no GPU has run this
