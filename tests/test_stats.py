"""Buffer.stats: what was counted, by which link, and who was waited for."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.processes import Pools
from tests.cases.slow_rank import EXPERTS, HIDDEN, NAP, RANKS, SLOW, TOKENS, WAYS, call
from tokenyard.testing import run_virtual


def slowed(group: Any, options: dict[str, Any], way: str) -> dict[str, Any]:
    """The figures of three rounds in which one rank comes late, after two that warm up."""
    rank = group.rank()
    low_latency = way == "low latency"
    with tokenyard.Buffer(group, low_latency_mode=low_latency, **options) as buffer:
        for _ in range(2):
            call(buffer, rank, way)
        buffer.stats(reset=True)
        for _ in range(3):
            if rank == SLOW:
                time.sleep(NAP)
            call(buffer, rank, way)
        return buffer.stats()


def check_blame(found: list[dict[str, Any]], slow: int) -> None:
    for stats in found:
        waited = stats["waited_for"]
        if stats["rank"] != slow:
            assert max(waited, key=waited.get) == slow, stats
            assert waited[slow] >= 1.5 * NAP
            assert stats["came_last"][slow] >= 2
        else:
            assert slow not in waited


@pytest.mark.parametrize("way", ["normal", "low latency", "by expert", "asynchronous"])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_slow_rank_is_named_by_all_others(options: dict[str, Any], way: str) -> None:
    found = run_virtual(slowed, RANKS, options, way, timeout=scaled(120)).results
    check_blame(found, SLOW)
    for stats in found:
        assert json.loads(json.dumps(stats))["rank"] == stats["rank"]
        # Every expert gets each of the pairs that all ranks send to it.
        pairs = [sum((t % EXPERTS == e) + ((t + 1) % EXPERTS == e) for t in range(TOKENS))
                 for e in range(EXPERTS)]  # fmt: skip
        first = stats["rank"] * EXPERTS // RANKS
        wanted = [3 * RANKS * pairs[e] for e in range(first, first + EXPERTS // RANKS)]
        assert stats["expert_load"] == wanted
        for counted in stats["stages"].values():
            assert counted["calls"] == 3
            assert counted["seconds"] > 0
    for stage in found[0]["stages"]:
        sent = sum(stats["stages"][stage]["rows_sent"] for stats in found)
        assert sent == sum(stats["stages"][stage]["rows_received"] for stats in found) > 0


@pytest.mark.parametrize("name", WAYS)
def test_bytes_are_counted_by_link(name: str) -> None:
    def job(group: Any) -> dict[str, Any]:
        with tokenyard.Buffer(group, **WAYS[name]) as buffer:
            call(buffer, group.rank())
            call(buffer, group.rank())
            return buffer.stats()

    for stats in run_virtual(job, RANKS, timeout=scaled(120)).results:
        links, rank = stats["bytes"], stats["rank"]
        assert sum(links.values()) == sum(stats["bytes_to"])
        assert links["itself"] == stats["bytes_to"][rank]
        beside = stats["bytes_to"][rank ^ 1]
        others = sum(stats["bytes_to"]) - links["itself"]
        if name == "collective":
            assert (links["shared memory"], links["network"]) == (0, others)
        elif name == "hierarchical":
            assert (links["shared memory"], links["network"]) == (beside, others - beside)
        else:
            assert (links["shared memory"], links["network"]) == (others, 0)
        # A row of dispatch has x, ids, weights and its token; one of combine x alone.
        stages, x = stats["stages"], 4 * HIDDEN
        assert stages["dispatch"]["bytes_sent"] == stages["dispatch"]["rows_sent"] * (x + 28)
        assert stages["combine"]["bytes_sent"] == stages["combine"]["rows_sent"] * x


def test_compiled_and_general_calls_count_alike() -> None:
    def job(group: Any, transport: str) -> dict[str, Any]:
        with tokenyard.Buffer(group, transport=transport, kernels="numba") as buffer:
            for _ in range(3):
                call(buffer, group.rank())
            return buffer.stats()

    compiled = run_virtual(job, 2, "direct", timeout=scaled(120)).results
    general = run_virtual(job, 2, "ring", timeout=scaled(120)).results
    for quick, slow in zip(compiled, general):
        for stats, way in ((quick, "compiled"), (slow, "general")):
            wanted = {"compiled": 0, "enclosed": 0, "general": 0, way: 3}
            assert stats["ways"] == {"dispatch": wanted, "combine": wanted}
            for counted in stats["stages"].values():
                del counted["seconds"]
        for name in ("stages", "bytes", "rows_to", "expert_load"):
            assert quick[name] == slow[name]


def test_ways_between_nodes() -> None:
    """In the first call ranks hear how much there is to enclose. A cached one is never compiled,
    and a large one encloses nothing.
    """

    def job(group: Any) -> dict[str, Any]:
        with tokenyard.Buffer(group, transport="hierarchical", ranks_per_node=1) as buffer:
            idx, weights = torch.tensor([[0, 1]] * 4), torch.ones(4, 2)
            for _ in range(3):
                got = buffer.dispatch(
                    torch.ones(4, 8), topk_idx=idx, topk_weights=weights, num_experts=2
                )
                buffer.combine(torch.ones(8, 8), got.handle)
            buffer.dispatch(torch.ones(4, 8), handle=got.handle)
            buffer.dispatch(torch.ones(4, 1 << 18), handle=got.handle)
            return buffer.stats()

    for stats in run_virtual(job, 2, timeout=scaled(60)).results:
        assert stats["nodes"] == [0, 1]
        assert stats["ways"] == {
            "dispatch": {"compiled": 2, "enclosed": 0, "general": 1},
            "combine": {"compiled": 2, "enclosed": 1, "general": 0},
            "cached dispatch": {"compiled": 0, "enclosed": 1, "general": 1},
        }


def test_reset_begins_anew_and_memory_stays() -> None:
    def job(group: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        with tokenyard.Buffer(group, transport="ring", num_nvl_bytes=1 << 20) as buffer:
            call(buffer, group.rank())
            return buffer.stats(reset=True), buffer.stats()

    for before, after in run_virtual(job, 2, timeout=scaled(60)).results:
        assert before["stages"]["dispatch"]["calls"] == 1
        assert after["stages"] == after["ways"] == after["waited_for"] == after["came_last"] == {}
        assert sum(after["rows_to"]) == sum(after["expert_load"]) == 0
        assert before["memory"] == after["memory"]
        assert 0 < after["memory"]["rings"] <= 1 << 20


def test_other_buffers_have_them_too() -> None:
    def job(group: Any) -> dict[str, Any]:
        with tokenyard.ElasticBuffer(group, 1 << 20) as buffer:
            buffer.barrier()
            return buffer.stats()

    for stats in run_virtual(job, 2, timeout=scaled(60)).results:
        assert stats["num_ranks"] == 2
        assert stats["memory"]["process"] >= 0


def second_slowed(group: Any) -> dict[str, Any]:
    with tokenyard.Buffer(group) as buffer:
        for _ in range(2):
            call(buffer, group.rank())
        buffer.stats(reset=True)
        for _ in range(3):
            if group.rank() == 1:
                time.sleep(NAP)
            call(buffer, group.rank())
        return buffer.stats()


@pytest.mark.processes
def test_between_processes(processes: Pools) -> None:
    check_blame(processes(2).run(second_slowed), 1)


def test_another_thread_may_ask_while_calls_are_made() -> None:
    """New stages and sizes appear while it looks."""

    def job(group: Any) -> None:
        ended = threading.Event()
        errors: list[Exception] = []
        with tokenyard.Buffer(group) as buffer:

            def watch() -> None:
                while not ended.is_set():
                    try:
                        buffer.stats(reset=True)
                    except Exception as error:
                        errors.append(error)
                        return

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                for num_experts in range(1, 150):
                    ids = torch.zeros(1, 1, dtype=torch.int64)
                    x, weights = torch.ones(1, 4), torch.ones(1, 1)
                    buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_experts=num_experts)
            finally:
                ended.set()
                watcher.join()
        assert not errors, errors

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run_virtual(job, 1, timeout=scaled(60))
    finally:
        sys.setswitchinterval(before)


def broken_or_closed(group: Any) -> tuple[Any, ...]:
    """The figures just before a Buffer was closed, afterwards, and those of one that broke."""
    with tokenyard.Buffer(group) as buffer:
        buffer.all_gather(torch.ones(3, 8))
        before = buffer.stats()
    after = buffer.stats(reset=True)
    late = tokenyard.Buffer(group, timeout=scaled(0.5))
    late.all_gather(torch.ones(3, 8))
    if group.rank() == 0:
        with pytest.raises(tokenyard.PeerError):
            late.all_gather(torch.ones(3, 8))
    return before, after, buffer.stats(), late.stats()


def test_a_closed_buffer_keeps_its_figures() -> None:
    for rank, (before, *after, broken) in enumerate(run_virtual(broken_or_closed, 2).results):
        for one in (before, *after):
            del one["memory"]["process"]  # of all ranks, which are threads here
        assert after == [before, before]
        assert before["stages"]["all_gather"]["rows_sent"] == 6
        assert broken["rank"] == rank
        assert broken["stages"]["all_gather"]["calls"] >= 1
