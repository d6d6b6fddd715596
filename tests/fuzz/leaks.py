"""What a process holds of what Buffers take, before a program and after it."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from tests.cases.clock import scaled


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """What a process has of what a Buffer takes."""

    descriptors: int
    files: frozenset[str]  # what they are of
    segments: int  # that are mapped
    segment_bytes: int
    threads: tuple[str, ...]

    @classmethod
    def now(cls) -> Holdings:
        with open("/proc/self/maps") as file:
            maps = [line.split()[0].split("-") for line in file if "/memfd:tokenyard" in line]
        names = sorted(one.name for one in threading.enumerate())
        files = []
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # the one that lists them
                files.append(os.readlink(f"/proc/self/fd/{number}"))
        return cls(
            descriptors=len(files),
            files=frozenset(files),
            segments=len(maps),
            segment_bytes=sum(int(end, 16) - int(begin, 16) for begin, end in maps),
            threads=tuple(name for name in names if name.startswith("tokenyard")),
        )

    def grown(self, seconds: float = 2.0) -> list[str]:
        """What there is more of than before, and stays. Threads that close Buffers, and gloo's,
        take a while to let go: so many seconds of this process's own time, since on a busy machine
        it may get little of it.
        """
        deadline, limit = time.monotonic() + scaled(60), time.process_time() + seconds
        while True:
            begin = time.monotonic()
            gc.collect()
            took = time.monotonic() - begin
            now = Holdings.now()
            more = [
                f"{name}: {getattr(now, name)}, before {getattr(self, name)}"
                for name in ("descriptors", "segments", "segment_bytes")
                if getattr(now, name) > getattr(self, name)
            ]
            if len(now.threads) > len(self.threads):
                more.append(f"threads: {now.threads}")
            if now.descriptors > self.descriptors:
                more.append(f"new files: {sorted(now.files - self.files)}")
            if not more or time.monotonic() > deadline or time.process_time() > limit:
                return more
            time.sleep(0.02 + took)  # collecting keeps the interpreter from those threads
