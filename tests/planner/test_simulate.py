"""Replays count what ranks would send, and rebalancing pays."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch

from tests.cases.clock import scaled
from tokenyard.planner import pictures
from tokenyard.planner.balance import place
from tokenyard.planner.balancer import Policy
from tokenyard.planner.choices import Routing
from tokenyard.planner.copies import CopyChooser, expected_traffic
from tokenyard.planner.cost import Work, plan
from tokenyard.planner.presets import CLUSTERS, MODELS
from tokenyard.planner.simulate import count_rows, drifting, replay
from tokenyard.planner.traffic import counted_rows, crossings_between, rows_between
from tokenyard.replicas import Replicas
from tokenyard.topology import Topology, even_split

DEEPSEEK, H800 = MODELS["deepseek-v3"], CLUSTERS["h800"]


@pytest.mark.parametrize("route", ["direct", "two_level"])
def test_counts_are_those_of_the_layout(route: str) -> None:
    numbers, topology = np.random.default_rng(0), Topology.even(8, 4)
    chosen = numbers.integers(-1, 16, (64, 3))
    owners = np.array(even_split(16, 8))
    got = count_rows(CopyChooser(Replicas.even(16, 8)).ranks(chosen), topology, route)
    given = list(chosen.reshape(8, 8, 3))
    crossings = crossings_between(given, owners, topology) if route == "two_level" else None
    want = counted_rows(rows_between(given, owners, 8), topology, crossings)
    for link in vars(want):
        assert getattr(got, link).tolist() == getattr(want, link).tolist(), link


def test_uniform_steps_take_what_the_plan_says() -> None:
    numbers = np.random.default_rng(1)
    chosen = np.argsort(numbers.random((64 * 512, 256), np.float32), 1)[:, :8]
    for mode in ("normal", "low_latency"):
        work = Work(num_tokens=512, mode=mode)
        found = replay([chosen], H800, DEEPSEEK, Replicas.even(256, 64), work)
        routing = Routing(num_experts=256, num_topk=8)
        expected = plan(H800, DEEPSEEK, 64, work, routing)
        # The busiest of 64 ranks gets some percent more than the average.
        assert found.seconds[0] == pytest.approx(expected.seconds, rel=0.08)


def test_rebalancing_makes_steps_shorter() -> None:
    steps = drifting(60, 1024, DEEPSEEK)
    even = Replicas.even(256, 32, 288)
    policy = Policy(every=10, if_over=1.1, want=1.05)
    before = replay(torch.from_numpy(steps), H800, DEEPSEEK, even)
    after = replay(torch.from_numpy(steps), H800, DEEPSEEK, even, policy=policy)
    assert before.changes == {}
    assert after.seconds[:10] == before.seconds[:10]
    assert after.changes[9].after <= 1.05 + 1e-9
    assert np.mean(after.imbalance[10:]) < 0.6 * np.mean(before.imbalance[10:])
    assert np.mean(after.seconds[10:]) < 0.8 * np.mean(before.seconds[10:])
    assert after.moved > 0
    assert json.loads(json.dumps(after.as_dict()))["steps"] == 60


@pytest.mark.parametrize("per_node", [32, 8])
def test_the_traffic_shows_the_gain_of_copies(per_node: int) -> None:
    """The issue's case: Zipf, 256 experts, 32 ranks, 32 spare slots, counted row by row."""
    steps = drifting(1, 32 * 256, DEEPSEEK, exponent=1.0)[0].astype(np.int64)
    load = np.bincount(steps.ravel(), minlength=256)
    topology = Topology.even(32, per_node)
    pairs = [
        count_rows(
            CopyChooser(one, topology).ranks(steps), topology, "direct", by_pair=True
        ).results
        for one in (Replicas.even(256, 32), place(load, 288, 32, topology))
    ]
    even, placed = (one.max() / one.mean() for one in pairs)
    assert even > 2
    assert placed < 1.05


def test_the_picture_shows_the_traffic_before_and_after() -> None:
    """The columns of what is drawn: the busiest rank gets 4.7 times the mean, then 1.0."""
    load = Routing.zipf(256, 8).load
    drawn = [
        expected_traffic(one, load) for one in (Replicas.even(256, 32, 288), place(load, 288, 32))
    ]
    before, after = (sent_RR.sum(0) / sent_RR.sum(0).mean() for sent_RR in drawn)
    assert before.max() == pytest.approx(4.70, abs=0.01)
    assert after.max() <= 1.05
    axes = pictures.draw_balance(*drawn).axes
    titles = [axis.get_title() for axis in axes]
    assert f"before: rank {before.argmax()} gets 4.70 of the mean" in titles
    assert f"after: rank {after.argmax()} gets 1.00 of the mean" in titles
    maps = [axis.images[0] for axis in axes if axis.images]
    assert [image.get_clim() for image in maps] == [(0.0, pytest.approx(before.max()))] * 2


def test_many_steps_at_256_ranks_are_fast() -> None:
    """A thousand steps are asked for within 60 s; twenty must take their share of it."""
    steps = drifting(4, 4096, DEEPSEEK)
    placement = Replicas.even(256, 256, 512)
    begin = time.process_time()
    found = replay(
        [steps[number % 4] for number in range(20)], H800, DEEPSEEK, placement, policy=Policy()
    )
    assert len(found.seconds) == 20
    assert time.process_time() - begin < scaled(20 * 60 / 1000)
