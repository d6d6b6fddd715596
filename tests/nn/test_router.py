"""How tokens choose, against loops, and what balancing does."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tokenyard.nn import MoE, Router, RouterConfig, update_biases
from tokenyard.nn.router import auxiliary_loss, choose, count
from tokenyard.testing import assert_same, run_virtual

DEEPSEEK = RouterConfig(
    num_experts=12, num_topk=3, score="sigmoid", scale=2.5, num_groups=4, num_kept_groups=2
)
CONFIGS = [
    pytest.param(RouterConfig(num_experts=5, num_topk=2), id="softmax"),
    pytest.param(RouterConfig(num_experts=5, num_topk=5), id="all"),
    pytest.param(RouterConfig(num_experts=5, num_topk=2, normalise=False, scale=3.0), id="plain"),
    pytest.param(RouterConfig(num_experts=5, num_topk=2, score="sigmoid"), id="sigmoid"),
    pytest.param(DEEPSEEK, id="deepseek"),
    pytest.param(
        RouterConfig(num_experts=4, num_topk=2, num_groups=4, num_kept_groups=3), id="groups-of-one"
    ),
]


def chosen_by_hand(
    logits: list[float], config: RouterConfig, bias: list[float]
) -> tuple[list[int], list[float]]:
    """One token's experts, best first, and their weights."""
    values = torch.tensor(logits)
    scores = (values.softmax(0) if config.score == "softmax" else values.sigmoid()).tolist()
    biased = [score + one for score, one in zip(scores, bias)]
    size = config.num_experts // config.num_groups
    groups = [range(first, first + size) for first in range(0, config.num_experts, size)]
    groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:2]))
    left = [e for group in groups[: config.num_kept_groups] for e in group]
    experts = sorted(left, key=lambda e: -biased[e])[: config.num_topk]
    total = sum(scores[e] for e in experts) if config.normalise else 1.0
    return experts, [config.scale * scores[e] / total for e in experts]


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("config", CONFIGS)
def test_router(config: RouterConfig, biased: bool) -> None:
    router = Router(7, config)
    bias = torch.randn(config.num_experts) if biased else torch.zeros(config.num_experts)
    router.register_buffer("bias", bias)
    x = torch.randn(40, 7)
    got = router(x)
    for token, logits in enumerate((x @ router.weight.t()).tolist()):
        experts, weights = chosen_by_hand(logits, config, bias.tolist())
        assert got.topk_idx[token].tolist() == experts
        torch.testing.assert_close(got.topk_weights[token], torch.tensor(weights))
    assert got.topk_weights.dtype == torch.float32


def test_groups_that_are_left_out_stay_so_where_biases_are_below_zero() -> None:
    config = RouterConfig(num_experts=4, num_topk=2, num_groups=2, num_kept_groups=1)
    scores = torch.tensor([[0.1, 0.2, 0.6, 0.7]])
    assert choose(scores, config, torch.full((4,), -5.0)).tolist() == [[3, 2]]


def test_scores_are_float32_however_narrow_x_is() -> None:
    """256 + 0.5 is 256 in bfloat16: what decides here is lost there."""
    router = Router(2, RouterConfig(num_experts=2, num_topk=1), dtype=torch.bfloat16)
    router.weight.data = torch.tensor([[256.0, 0.0], [256.0, 0.5]], dtype=torch.bfloat16)
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        got = router(x)
    assert got.topk_idx.tolist() == [[1]]
    assert got.scores.dtype == torch.float32


def test_gradients_reach_scores_of_chosen_experts_alone() -> None:
    router = Router(3, RouterConfig(num_experts=4, num_topk=2, score="sigmoid", normalise=False))
    got = router(torch.randn(1, 3))
    got.topk_weights.sum().backward()
    moved = router.weight.grad.abs().sum(1) > 0
    assert moved.nonzero().flatten().tolist() == sorted(got.topk_idx[0].tolist())


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"score": "relu"}, "score is 'relu', want one of softmax, sigmoid"),
        ({"num_topk": 7}, "num_topk is 7, want at most 6"),
        ({"num_groups": 4}, "num_groups is 4, want a divisor of num_experts (6)"),
        ({"num_groups": 3, "num_kept_groups": 4}, "num_kept_groups is 4, want at most 3"),
        ({"num_groups": 3, "num_topk": 3}, "num_topk is 3, want at most 2"),
        ({"num_experts": 0}, "num_experts is 0, want at least 1"),
    ],
)
def test_bad_config(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        RouterConfig(**{"num_experts": 6, "num_topk": 2, **changed})


def biased_layer(group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(bias, load, load after the update) of a layer that was called twice."""
    config = RouterConfig(num_experts=4, num_topk=1, bias_rate=0.5)
    with tokenyard.Buffer(group) as buffer:
        layer = MoE(buffer, 4, 4, config)
        layer.router.weight.data = torch.eye(4)
        x = torch.eye(4)[[0, 0, 0, 1] if group.rank() == 0 else [1, 2, 2, 2]]
        layer(x)
        layer.eval()(x)  # does not count
        layer.train()(x[:2])
        load = layer.router.load.clone()
        update_biases(layer)
        return layer.router.bias, load, layer.router.load


def test_bias_moves_by_what_all_ranks_chose() -> None:
    (bias, load, after), (bias_1, load_1, _) = run_virtual(biased_layer, 2).results
    assert load.tolist() == [5.0, 1.0, 0.0, 0.0]
    assert load_1.tolist() == [0.0, 2.0, 4.0, 0.0]
    assert bias.tolist() == [-0.5, 0.0, -0.5, 0.5]  # of 12 choices 5, 3, 4 and 0
    assert_same(bias_1, bias)
    assert after.tolist() == [0.0] * 4


def test_bias_evens_out_a_skewed_load() -> None:
    def job(group: Any) -> float:
        config = RouterConfig(num_experts=8, num_topk=2, score="sigmoid", bias_rate=0.01)
        with tokenyard.Buffer(group) as buffer:
            layer = MoE(buffer, 8, 4, config)
            skew = torch.linspace(-2, 2, 8)
            x = torch.randn(200, 8, generator=torch.Generator().manual_seed(group.rank()))
            layer.router.weight.data = torch.eye(8)
            for _ in range(60):
                with torch.no_grad():
                    chosen = layer.router(x + skew)
                update_biases(layer)
            load = count(chosen.topk_idx, 8)
            return float(load.max() / load.mean())

    assert max(run_virtual(job, 2).results) < 1.35  # without the bias it is 3.1


def test_auxiliary_loss_is_that_of_one_rank() -> None:
    """The mean over ranks, and of its gradients, whatever the number of ranks."""

    def job(group: Any) -> tuple[Tensor, Tensor]:
        config = RouterConfig(num_experts=6, num_topk=2, auxiliary_loss=0.5)
        with tokenyard.Buffer(group) as buffer:
            layer = MoE(buffer, 6, 4, config)
            generator = torch.Generator().manual_seed(0)
            layer.router.weight.data = torch.randn(6, 6, generator=generator)
            x = torch.randn(24, 6, generator=generator).chunk(group.size())[group.rank()]
            layer(x)
            layer.auxiliary_loss.backward()
            return layer.auxiliary_loss.detach(), layer.router.weight.grad

    ((loss, grad),) = run_virtual(job, 1).results
    assert loss > 0.5  # the least there is, where all are chosen alike
    for num_ranks in (2, 4):
        results = run_virtual(job, num_ranks).results
        torch.testing.assert_close(torch.stack([one for one, _ in results]).mean(0), loss)
        torch.testing.assert_close(torch.stack([one for _, one in results]).mean(0), grad)


def test_auxiliary_loss_of_no_tokens() -> None:
    loss = auxiliary_loss(torch.zeros(0, 4, requires_grad=True), torch.zeros(4))
    assert loss.item() == 0.0
    loss.backward()


def test_choices_have_no_ties_that_depend_on_other_tokens() -> None:
    config = RouterConfig(num_experts=6, num_topk=3)
    scores = torch.zeros(50, 6)
    alone = torch.cat([choose(row[None], config, None) for row in scores])
    assert_same(choose(scores, config, None), alone)
