"""The cost model beside published figures, and what it must say of simple cases."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from tokenyard.planner.choices import Routing
from tokenyard.planner.cost import Cluster, Model, Work, plan
from tokenyard.planner.fitted import compare, fit
from tokenyard.planner.presets import CLUSTERS, MODELS, cluster_of, model_of
from tokenyard.planner.published import ELSEWHERE, LOW_LATENCY, NORMAL

DEEPSEEK, H800 = MODELS["deepseek-v3"], CLUSTERS["h800"]

SIMPLE = Model(name="simple", hidden=100, num_experts=4, num_topk=4, intermediate=10, num_layers=2)
SLOW = Cluster(name="slow", ranks_per_node=2, node_rate=1e6, network_rate=1e5, overhead=1e-3)


def test_the_presets_are_what_the_fit_finds() -> None:
    found = fit([*LOW_LATENCY, *NORMAL], H800, DEEPSEEK)
    for name in ("overhead", "node_rate", "network_rate"):
        assert getattr(found, name) == pytest.approx(getattr(H800, name), rel=0.003), name


def test_low_latency_on_h800_within_4_percent_on_average() -> None:
    errors = [abs(point.error) for point in compare(LOW_LATENCY, CLUSTERS, DEEPSEEK)]
    assert len(errors) == 12
    assert np.mean(errors) < 0.04
    assert max(errors) < 0.08


def test_fitted_on_64_ranks_it_predicts_128_and_256() -> None:
    few = [figure for figure in (*LOW_LATENCY, *NORMAL) if figure.num_ranks <= 64]
    found = fit(few, replace(H800, node_rate=100e9, network_rate=100e9), DEEPSEEK)
    unseen = [figure for figure in LOW_LATENCY if figure.num_ranks > 64]
    errors = [abs(point.error) for point in compare(unseen, {"h800": found}, DEEPSEEK)]
    assert len(errors) == 4
    assert max(errors) < 0.10


def test_normal_mode_on_h800_within_10_percent() -> None:
    """At 16 ranks NVLink binds, which is why the network looks slow there."""
    points = compare(NORMAL, CLUSTERS, DEEPSEEK)
    assert max(abs(point.error) for point in points) < 0.10
    bound = {point.figure.num_ranks: point.bound_by for point in points}
    assert bound == {8: "node", 16: "node", 32: "network", 64: "network"}


def test_other_clusters_are_near_what_others_measured() -> None:
    errors = [abs(point.error) for point in compare(ELSEWHERE, CLUSTERS, DEEPSEEK)]
    assert np.mean(errors) < 0.12


def test_a_case_by_hand() -> None:
    """Four ranks on two nodes; every token chooses all experts, one a rank, so all ranks get it."""
    work = Work(num_tokens=10, fp8=False)
    notify, dispatch, combine = plan(SLOW, SIMPLE, 4, work).stages
    row = 200 + 4 * 12 + 4
    # A rank sends 10 rows to its partner, and passes on its own and its partner's 10: 20 to itself,
    # 20 to its neighbour.
    assert dispatch.bytes == {"itself": 20 * row, "node": 20 * row, "network": 10 * row}
    assert dispatch.seconds == pytest.approx(1e-3 + max(40 * row / 1e6, 10 * row / 1e5))
    assert combine.bytes["network"] == 10 * 200
    assert (dispatch.bound_by, combine.bound_by) == ("network", "network")
    assert notify.bytes == {"itself": 0, "node": 1024, "network": 2048}


def test_a_node_alone_uses_no_network() -> None:
    made = plan(SLOW, SIMPLE, 2, Work(num_tokens=10))
    assert all(stage.bytes["network"] == 0 for stage in made.stages)
    assert made.stages[1].bound_by == "node"


def test_low_latency_moves_pairs_straight() -> None:
    low = plan(SLOW, SIMPLE, 2, Work(num_tokens=10, mode="low_latency", fp8=False))
    assert [stage.name for stage in low.stages] == ["dispatch", "combine"]
    # Two experts a rank: a token goes there twice, or once where rows travel by rank.
    assert low.stages[0].bytes["node"] == 20 * 216
    once = plan(replace(SLOW, by_pair=False), SIMPLE, 2, low.work)
    assert once.stages[0].bytes["node"] == 10 * 216


def test_memory_by_part() -> None:
    made = plan(SLOW, SIMPLE, 4, Work(num_tokens=10, fp8=False, weight_bytes=2))
    assert made.memory == {
        "experts' weights, a layer": 3 * 100 * 10 * 2,
        "experts' weights, all layers": 3 * 100 * 10 * 2 * 2,
        "tokens and their sums": 2 * 10 * 200,
        "received rows": 40 * 252,
        "experts' results": 40 * 200,
    }
    low = plan(SLOW, SIMPLE, 4, Work(num_tokens=10, fp8=False, mode="low_latency"))
    assert low.memory["slots of combine"] == 2 * 1 * 4 * 10 * 200


def test_2048_ranks_are_planned_within_a_second() -> None:
    begin = time.process_time()
    made = plan(H800, DEEPSEEK, 2048)
    assert time.process_time() - begin < 1.0
    assert made.bound_by == "network"
    assert made.notes[0] == "1792 of 2048 slots hold copies, so that all ranks have as many"
    skewed = Routing.zipf(2048, 8)
    assert plan(H800, DEEPSEEK, 2048, routing=skewed).imbalance > 10


def test_a_hot_expert_costs_time() -> None:
    even = plan(H800, DEEPSEEK, 64, routing=Routing(num_experts=256, num_topk=8))
    hot = plan(H800, DEEPSEEK, 64, routing=Routing.zipf(256, 8))
    assert even.imbalance == pytest.approx(1)
    assert hot.imbalance > 2
    assert hot.seconds > 1.5 * even.seconds


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MODELS)
def test_every_preset_can_be_planned(model: str, cluster: str) -> None:
    for mode in ("normal", "low_latency"):
        made = plan(cluster_of(cluster), model_of(model), 16, Work(num_tokens=128, mode=mode))
        assert 0 < made.seconds < 10
        assert json.loads(json.dumps(made.as_dict()))["num_ranks"] == 16


def test_mistakes_say_what_is_wanted() -> None:
    with pytest.raises(ValueError, match="unknown cluster 'h900'; available: h800, h100"):
        cluster_of("h900")
    with pytest.raises(ValueError, match="unknown model 'x'; available: deepseek-v3"):
        model_of("x")
    with pytest.raises(ValueError, match="mode is 'fast', want normal or low_latency"):
        Work(mode="fast")
    with pytest.raises(ValueError, match="num_ranks is 0, want at least 1"):
        plan(H800, DEEPSEEK, 0)
