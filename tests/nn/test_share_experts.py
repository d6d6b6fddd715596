"""Layers whose ranks compute with each other's experts, which lie in memory that they share."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tokenyard
from tests.cases.clock import scaled
from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tests.cases.shared_memory import files_and_maps
from tokenyard.nn import MoE, RouterConfig, checkpoint_state, rebalance, share_experts
from tokenyard.testing import Processes, assert_same

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no shared memory"),
]

HIDDEN, NUM_EXPERTS = 32, 10  # so that ranks have different numbers of experts
WAYS: list[dict[str, Any]] = [
    {},
    {"transport": "collective"},
    {"transport": "ring"},
    {"ranks_per_node": 2},
]


@pytest.fixture
def two(processes: Pools) -> Processes:
    return processes(2)


def layer(buffer: tokenyard.Buffer, num_topk: int = 3, **options: Any) -> MoE:
    """The same on every rank, to be evaluated; tokens like its first experts best."""
    torch.manual_seed(3)
    router = RouterConfig(num_experts=NUM_EXPERTS, num_topk=num_topk)
    made = MoE(buffer, HIDDEN, 24, router, shared=8, **options)
    with torch.no_grad():
        made.router.weight.add_(torch.linspace(1, 0, NUM_EXPERTS)[:, None])
    return made.eval()


def inputs(rank: int, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * num_tokens + rank)
    return torch.randn(num_tokens + rank, HIDDEN, generator=generator) + 0.3


def opened(group: Any, **options: Any) -> tokenyard.Buffer:
    return tokenyard.Buffer(group, timeout=scaled(60), **options)


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def evaluate(group: Any, options: dict[str, Any], numbers: list[int], fixed: bool) -> int:
    """Few tokens and many, as a layer without a balance has it. Rows that another rank computes."""
    rank = group.rank()
    with opened(group, **options) as buffer, opened(group, **options, balance=0.05) as balanced:
        assert balanced.balance == 0.05
        for num_tokens in numbers:
            worst = (num_tokens + 4) * group.size() * fixed
            plain, model = (layer(one, num_worst_tokens=worst) for one in (buffer, balanced))
            own = len(model.experts.ids)
            assert len(balanced.get_node_experts(NUM_EXPERTS)) > own
            x = inputs(rank, num_tokens)
            for without in (torch.no_grad, torch.inference_mode):
                with without():
                    want, got = plain(x), model(x)
                    near(got, want)
                    assert_same(model(x), got)
        told: dict[str, Any] = balanced.stats()["balance"]
        assert told["busiest_after"] <= told["busiest_before"]
        assert (told["borrowed_bytes"] > 0) == (told["borrowed_rows"] > 0)
        return int(told["borrowed_rows"])


@pytest.mark.parametrize("num_ranks", at_night([2, 4], gate=(4,)))
@pytest.mark.parametrize("options", WAYS, ids=lambda one: str([*one.values()]))
def test_results_are_those_without_a_balance(
    processes: Pools, num_ranks: int, options: dict[str, Any]
) -> None:
    if num_ranks == options.get("ranks_per_node"):
        options = {}
    borrowed = processes(num_ranks).run(evaluate, options, [0, 3, 150], False)
    assert any(borrowed), "no rank computed for another"


def test_no_size_needs_to_depend_on_values(two: Processes) -> None:
    assert any(two.run(evaluate, {}, [20], True))


def compiled(group: Any) -> None:
    with opened(group, balance=0.0) as buffer:
        for worst in (0, 50):
            model = layer(buffer, num_worst_tokens=worst)
            fast: Any = torch.compile(model, fullgraph=worst > 0)
            x = inputs(group.rank(), 20)
            with torch.no_grad():
                near(fast(x), model(x))
                swap(model.experts.down)
                with pytest.raises(ValueError, match="share_experts"):
                    fast(x)
                share_experts(model)
                near(fast(x), model(x))


@pytest.mark.slow
def test_compiled_layers_do_the_same(two: Processes) -> None:
    two.run(compiled)


def swap(parameter: nn.Parameter) -> None:
    """As some optimisers do."""
    parameter.data = parameter.data.clone()


def train(group: Any, parts: str) -> None:
    """Steps of an optimiser: the same bits, and the next evaluation has their weights."""
    rank = group.rank()
    with opened(group) as buffer, opened(group, balance=0.0) as balanced:
        models = layer(buffer).train(), layer(balanced).train()
        x, grads = inputs(rank, 12), []
        for model in models:
            if parts == "experts alone":
                model.requires_grad_(False)
                model.experts.requires_grad_(True)
            wanted = [one for one in model.parameters() if one.requires_grad]
            optimizer = torch.optim.AdamW(wanted, 0.05)
            for _ in range(2):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
            grads.append([one.grad for one in wanted])
        for one, other in zip(*grads):
            assert one is not None
            assert other is not None
            assert_same(other, one)
        plain, model = models[0].eval(), models[1].eval()
        with torch.no_grad():
            near(model(x), plain(x))
        model.load_state_dict(layer(buffer).state_dict())  # in place
        state = checkpoint_state(model)
        for name, tensor in checkpoint_state(layer(buffer)).items():
            assert_same(state[name], tensor)
        with torch.no_grad():
            near(model(x), layer(buffer)(x))


@pytest.mark.parametrize("parts", ["all", "experts alone"])
def test_training_is_as_without_a_balance(two: Processes, parts: str) -> None:
    two.run(train, parts)


def compute_again(group: Any, worst: int) -> None:
    """Checkpoints, whose forward pass may make no graph: the same bits, also of frozen experts."""
    with opened(group) as buffer, opened(group, balance="exact") as balanced:
        models = [
            layer(one, num_worst_tokens=worst, dtype=torch.bfloat16).train()
            for one in (buffer, balanced)
        ]
        for num_tokens, is_reentrant, is_trained in product(
            (12, 150), (True, False), (True, False)
        ):
            got = []
            for model in models:
                model.experts.requires_grad_(is_trained)
                model.zero_grad()
                x = inputs(group.rank(), num_tokens).bfloat16().requires_grad_()
                y = checkpoint(model, x, use_reentrant=is_reentrant)
                y.float().square().sum().backward()
                wanted = [one.grad for one in model.parameters() if one.requires_grad]
                got.append([y.detach(), x.grad, *wanted])
            assert_same(got[1], got[0])
        with torch.no_grad():
            models[1](inputs(group.rank(), 150).bfloat16())
            assert balanced.stats()["balance"] is None
            models[1].eval()(inputs(group.rank(), 150).bfloat16())
            assert balanced.stats()["balance"]["borrowed_rows"] >= 0


@pytest.mark.parametrize("worst", [0, 400], ids=["", "fixed sizes"])
def test_what_is_computed_again_goes_by_owner_at_once(two: Processes, worst: int) -> None:
    two.run(compute_again, worst)


def infer(group: Any) -> None:
    """Where all ranks make a model in inference mode, and where one does."""
    with opened(group) as buffer, opened(group, balance="exact") as balanced:
        plain, x = layer(buffer), inputs(group.rank(), 30)
        for ranks in ((0, 1), (0,)):
            with torch.inference_mode(group.rank() in ranks):
                model = layer(balanced)
            assert model.experts.down.is_inference() == (group.rank() in ranks)
            for without in (torch.no_grad, torch.inference_mode):
                with without():
                    near(model(x), plain(x))
            share_experts(model)
            with torch.inference_mode():
                share_experts(model)
                model.load_state_dict(plain.state_dict())
                near(model(x), plain(x))


def test_a_model_may_be_made_in_inference_mode(two: Processes) -> None:
    two.run(infer)


def assign(model: MoE) -> None:
    state = {name: one.clone() for name, one in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


LEAVES: dict[str, Callable[[MoE], object]] = {
    "assign": assign,
    "to": lambda model: model.double().float(),
    "to_empty": lambda model: model.experts.to_empty(device="cpu"),
    "optimiser": lambda model: swap(model.experts.down),
    "share_memory": lambda model: model.share_memory(),
}


def leave(group: Any, how: str) -> list[str]:
    """On rank 1 alone, or, after a deepcopy, on all ranks."""
    said = []
    with opened(group, balance=0.0) as buffer, torch.no_grad():
        model = layer(buffer)
        if how == "copy":
            model = copy.deepcopy(model)
        elif group.rank() == 1:
            LEAVES[how](model)
        for num_tokens in (2, 200):
            try:
                model(inputs(group.rank(), num_tokens))
            except ValueError as error:
                said.append(str(error))
        share_experts(model)
        model(inputs(group.rank(), 3))
    return said


@pytest.mark.parametrize("how", [*LEAVES, "copy"])
def test_weights_that_left_are_refused_until_shared_again(two: Processes, how: str) -> None:
    for said in two.run(leave, how):
        assert len(said) == 2
        assert all("want tokenyard.nn.share_experts(model)" in one for one in said)
        assert how == "copy" or all("of rank 1 is not in" in one for one in said)


def refuse(group: Any) -> list[str]:
    said = []

    def note(call: Callable[[], object]) -> None:
        try:
            call()
        except ValueError as error:
            said.append(str(error))

    with opened(group, balance=0.0) as buffer:
        model, rank = layer(buffer), group.rank()
        places = torch.arange(NUM_EXPERTS) % 2
        note(lambda: rebalance(model, places))
        note(lambda: layer(buffer, share_experts=None if rank == 0 else False))
        meta = layer(buffer, device="meta") if rank == 1 else model
        note(lambda: share_experts(meta))
        note(lambda: share_experts(nn.Linear(2, 2)))
        with torch.no_grad():
            near(model(inputs(rank, 4)), model(inputs(rank, 4)))
    return said


def test_what_cannot_be_shared_is_refused_on_all_ranks(two: Processes) -> None:
    for said in two.run(refuse):
        moved, unshared, meta, nothing = said
        assert "lie in memory that ranks share, and stay there" in moved
        assert "share_experts is False, and the Buffer has a balance" in unshared
        assert "experts.gate_up is on meta, want cpu" in meta
        assert "holds no experts" in nothing


def empty_first(group: Any) -> None:
    with opened(group, balance=0.0) as buffer, torch.no_grad():
        whole, x = layer(buffer), inputs(group.rank(), 4)
        with torch.device("meta"):
            model = MoE(buffer, HIDDEN, 24, whole.router.config, shared=8).eval()
        model.to_empty(device="cpu").load_state_dict(whole.state_dict())
        share_experts(model)
        assert_same(model(x), whole(x))


def test_a_model_that_begins_without_memory_is_shared_later(two: Processes) -> None:
    two.run(empty_first)


def without_balance(group: Any) -> tuple[int, int]:
    """Shared all the same: nobody borrows, and nothing is refused. Maps that come and go."""
    with opened(group) as buffer, torch.no_grad():
        plain, before = layer(buffer), len(files_and_maps())
        model = layer(buffer, share_experts=True)
        taken = len(files_and_maps()) - before
        x = inputs(group.rank(), 5)
        assert_same(model(x), plain(x))
        model.double().float()
        near(model(x), plain(x))
        gc.collect()
        held = len(files_and_maps())
        del model
        gc.collect()
        return taken, held - len(files_and_maps())


def test_memory_goes_with_the_model(two: Processes) -> None:
    for rank, (taken, given_back) in enumerate(two.run(without_balance)):
        # Parameters times ranks, and for rank 1 rank 0's page in which its part begins.
        assert taken == given_back == 2 * (2 + rank)
