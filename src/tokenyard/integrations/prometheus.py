"""Figures of Buffers for Prometheus, where `prometheus_client` is installed.

    from prometheus_client import REGISTRY
    from tokenyard.integrations.prometheus import BufferCollector

    REGISTRY.register(BufferCollector(buffer))

`BufferCollector` reads `Buffer.stats` when somebody asks, and costs nothing in between. It is for a
process that serves its own figures. Where several processes write theirs to
PROMETHEUS_MULTIPROC_DIR, and another one serves them all, nobody asks a collector: `Publisher`
copies figures into metrics of its own then, as often as it is told to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tokenyard.buffer import Buffer
from tokenyard.errors import TokenyardError


class _Metric(NamedTuple):
    name: str  # without `_total`, which counters get
    text: str
    labels: tuple[str, ...]
    is_counter: bool = True


_CALLS = _Metric("tokenyard_calls", "Calls of a stage", ("rank", "stage"))
_SECONDS = _Metric("tokenyard_call_seconds", "Seconds in calls of a stage", ("rank", "stage"))
_SENT = _Metric("tokenyard_rows_sent", "Rows sent by a stage", ("rank", "stage"))
_RECEIVED = _Metric("tokenyard_rows_received", "Rows received by a stage", ("rank", "stage"))
_BYTES = _Metric("tokenyard_bytes_sent", "Bytes of rows sent, by link", ("rank", "link"))
_WAITED = _Metric(
    "tokenyard_waited_seconds", "Seconds waited until the slowest peer came", ("rank", "peer")
)
_LAST = _Metric("tokenyard_came_last", "Waits that a peer ended, coming last", ("rank", "peer"))
_LOAD = _Metric("tokenyard_expert_rows", "Rows of each local expert", ("rank", "expert"))
_MEMORY = _Metric("tokenyard_memory_bytes", "Memory held, by part", ("rank", "part"), False)
METRICS = (_CALLS, _SECONDS, _SENT, _RECEIVED, _BYTES, _WAITED, _LAST, _LOAD, _MEMORY)


def samples(stats: dict[str, Any]) -> Iterator[tuple[_Metric, tuple[str, ...], float]]:
    """Each metric's values in the figures of one Buffer, with their labels."""
    rank = str(stats["rank"])
    for stage, counted in stats["stages"].items():
        for metric, name in (
            (_CALLS, "calls"),
            (_SECONDS, "seconds"),
            (_SENT, "rows_sent"),
            (_RECEIVED, "rows_received"),
        ):
            yield metric, (rank, stage), counted[name]
    for metric, values in (
        (_BYTES, stats["bytes"]),
        (_WAITED, stats["waited_for"]),
        (_LAST, stats["came_last"]),
        (_LOAD, dict(enumerate(stats["expert_load"]))),
        (_MEMORY, stats["memory"]),
    ):
        for label, value in values.items():
            yield metric, (rank, str(label)), value


def _sum(buffers: Iterable[Buffer]) -> dict[tuple[_Metric, tuple[str, ...]], float]:
    """The figures of several Buffers of a process, added up. Closed Buffers count no more."""
    found: dict[tuple[_Metric, tuple[str, ...]], float] = {}
    for buffer in buffers:
        try:
            buffer._open_engine()
            stats = buffer.stats()
        except TokenyardError:
            continue
        for metric, labels, value in samples(stats):
            found[metric, labels] = found.get((metric, labels), 0) + value
    return found


class BufferCollector:
    """A collector of Buffers, as `prometheus_client` calls it."""

    def __init__(self, *buffers: Buffer) -> None:
        self._buffers = buffers

    def collect(self) -> Iterator[Any]:
        """All metrics, with what the Buffers say now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[_Metric, Any] = {}
        for metric in METRICS:
            family = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            families[metric] = family(metric.name, metric.text, labels=metric.labels)
        for (metric, labels), value in _sum(self._buffers).items():
            families[metric].add_metric(labels, value)
        yield from families.values()


class Publisher:
    """Copies figures of Buffers into metrics of this process, which other processes can serve."""

    def __init__(self, registry: Any = None) -> None:
        """The metrics belong to this registry, `prometheus_client.REGISTRY` if None."""
        import prometheus_client

        where = prometheus_client.REGISTRY if registry is None else registry
        self._buffers: list[Buffer] = []
        self._lock = threading.Lock()
        self._before: dict[tuple[_Metric, tuple[str, ...]], float] = {}
        self._metrics: dict[_Metric, Any] = {}
        for metric in METRICS:
            more: dict[str, Any] = {"registry": where}
            made: Any = prometheus_client.Counter
            if not metric.is_counter:
                # What a process that has ended held is not held any more.
                made, more["multiprocess_mode"] = prometheus_client.Gauge, "livesum"
            self._metrics[metric] = made(metric.name, metric.text, metric.labels, **more)

    def add(self, buffer: Buffer) -> None:
        """Publish the figures of this Buffer too."""
        with self._lock:
            self._buffers.append(buffer)

    def publish(self) -> None:
        """Bring the metrics up to date."""
        with self._lock:
            now = _sum(self._buffers)
            for (metric, labels), value in now.items():
                one = self._metrics[metric].labels(*labels)
                if metric.is_counter:
                    before = self._before.get((metric, labels), 0)
                    # Somebody may have reset the figures: then all of them is new.
                    one.inc(value - before if value >= before else value)
                else:
                    one.set(value)
            self._before = now
