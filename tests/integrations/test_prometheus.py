"""Figures of Buffers as Prometheus reads them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tokenyard.integrations.prometheus import BufferCollector, Publisher
from tokenyard.testing import run_virtual

client = pytest.importorskip("prometheus_client")


def call(buffer: Any) -> None:
    idx, weights = torch.tensor([[0, 3]]), torch.ones(1, 2)
    got = buffer.dispatch(torch.ones(1, 32), topk_idx=idx, topk_weights=weights, num_experts=4)
    buffer.combine(got.recv_x, got.handle)


def values(registry: Any) -> dict[str, float]:
    """By name and labels, as the text of a page has them."""
    page = client.generate_latest(registry).decode()
    parsed = client.parser.text_string_to_metric_families(page)
    return {
        f"{one.name}{sorted(one.labels.items())}": one.value
        for family in parsed
        for one in family.samples
        if not one.name.endswith("_created")
    }


def test_a_collector_tells_what_stats_says() -> None:
    import prometheus_client.parser  # noqa: F401 - makes client.parser

    def job(group: Any) -> None:
        registry = client.CollectorRegistry()
        with tokenyard.Buffer(group, transport="direct") as buffer:
            registry.register(BufferCollector(buffer))
            call(buffer)
            stats, found = buffer.stats(), values(registry)
            rank = str(group.rank())
            stage = [("rank", rank), ("stage", "dispatch")]
            assert found[f"tokenyard_calls_total{stage}"] == 1
            assert found[f"tokenyard_rows_sent_total{stage}"] == 2
            for link, count in stats["bytes"].items():
                assert (
                    found[f"tokenyard_bytes_sent_total{[('link', link), ('rank', rank)]}"] == count
                )
            for part, held in stats["memory"].items():
                if part != "process":  # the other rank's, too
                    name = [("part", part), ("rank", rank)]
                    assert found[f"tokenyard_memory_bytes{name}"] == held
            assert (
                found[f"tokenyard_expert_rows_total{[('expert', '0'), ('rank', rank)]}"]
                == (stats["expert_load"][0])
            )
        assert not values(registry)  # it is closed

    run_virtual(job, 2, timeout=scaled(60))


def test_a_publisher_adds_what_is_new() -> None:
    import prometheus_client.parser  # noqa: F401

    def job(group: Any) -> None:
        registry = client.CollectorRegistry()
        publisher = Publisher(registry)
        name = f"tokenyard_calls_total{[('rank', '0'), ('stage', 'dispatch')]}"
        with tokenyard.Buffer(group, transport="direct") as buffer:
            publisher.add(buffer)
            for calls in (1, 2):
                call(buffer)
                publisher.publish()
                publisher.publish()
                assert values(registry)[name] == calls
            buffer.stats(reset=True)
            call(buffer)
            publisher.publish()
            assert values(registry)[name] == 3

    run_virtual(job, 1, timeout=scaled(60))


WORKER = """
import torch, tokenyard
from tests.integrations.test_prometheus import call
from tokenyard.integrations.vllm import metrics
from tokenyard.testing import run_virtual

def job(group):
    with tokenyard.Buffer(group, transport="direct") as buffer:
        publish = metrics.show(buffer, None)
        call(buffer)
        publish()

run_virtual(job, 1)
"""


@pytest.mark.processes
def test_another_process_serves_the_figures(tmp_path: Any) -> None:
    """As vLLM's API server does with those of its workers."""
    from prometheus_client import multiprocess

    more = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-c", WORKER], env=os.environ | more, check=True, timeout=scaled(120)
    )
    registry = client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    page = client.generate_latest(registry).decode()
    assert 'tokenyard_calls_total{rank="0",stage="dispatch"} 1.0' in page
