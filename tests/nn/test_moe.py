"""The layer against the same in plain torch, on any number of ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tokenyard
from tests.cases.nn import moe as jobs
from tokenyard.nn import MoE, RouterConfig, checkpoint_state
from tokenyard.testing import Processes, assert_same, poisoned, run_virtual

RANKS = [1, 2, 3, 8]  # of which the last have more than there are experts


def by_hand(layer: MoE, x: Tensor) -> Tensor:
    """Every token through each of its experts, one after the other; the layer has all of them."""
    chosen = layer.router(x)
    out = torch.zeros_like(x)
    for k in range(chosen.topk_idx.shape[1]):
        for token, expert in enumerate(chosen.topk_idx[:, k].tolist()):
            gate, up = (x[token] @ layer.experts.gate_up[expert]).chunk(2)
            y = (torch.nn.functional.silu(gate) * up) @ layer.experts.down[expert]
            out[token] = out[token] + chosen.topk_weights[token, k] * y
    return out if layer.shared is None else out + layer.shared(x)


def layer_job(group: Any, num_worst_tokens: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs and gradients of this rank's tokens."""
    with tokenyard.Buffer(group) as buffer:
        model = jobs.make_model(buffer, num_worst_tokens=num_worst_tokens)
        x = jobs.tokens(group.rank(), group.size()).requires_grad_()
        out = model.second(x)
        out.square().sum().backward()
        model.second.eval()
        named = {"x": x.grad}
        for name, parameter in model.second.named_parameters():
            if name.startswith("experts"):
                ids = model.second.experts.ids
                named.update({f"{name}.{e}": parameter.grad[i] for i, e in enumerate(ids)})
            else:
                named[name] = parameter.grad
        return out.detach(), named


@pytest.fixture(scope="module")
def want() -> tuple[Tensor, dict[str, Tensor]]:
    def job(group: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with tokenyard.Buffer(group) as buffer:
            layer = jobs.make_model(buffer).second
            x = jobs.tokens(0, 1).requires_grad_()
            out = by_hand(layer, x)
            out.square().sum().backward()
            named = {name: one.grad for name, one in layer.named_parameters()}
            return out.detach(), {"x": x.grad, **named}

    return run_virtual(job, 1).results[0]


@pytest.mark.parametrize("worst", [0, jobs.NUM_TOKENS], ids=["as-many", "static"])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_the_layer_is_that_of_one_rank(
    want: tuple[Tensor, dict[str, Tensor]], num_ranks: int, worst: int
) -> None:
    want_out, want_grads = want
    with poisoned():
        results = run_virtual(layer_job, num_ranks, worst).results
    torch.testing.assert_close(torch.cat([out for out, _ in results]), want_out)
    for name, due in want_grads.items():
        if name == "x":
            got = torch.cat([grads["x"] for _, grads in results])
        elif name.startswith("experts"):
            every = {key: grad for _, grads in results for key, grad in grads.items()}
            got = torch.stack([every[f"{name}.{e}"] for e in range(jobs.NUM_EXPERTS)])
        else:
            got = torch.stack([grads[name] for _, grads in results]).sum(0)
        torch.testing.assert_close(got, due, msg=partial("{}: {}".format, name))


def test_static_rows_change_no_bit() -> None:
    few, many = (run_virtual(layer_job, 2, worst).results for worst in (0, 60))
    for (out, grads), (same_out, same_grads) in zip(few, many):
        assert_same(same_out, out)
        assert_same(list(same_grads.values()), list(grads.values()))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_parameters_begin_alike_on_any_number_of_ranks(num_ranks: int) -> None:
    def job(group: Any) -> dict[str, Tensor]:
        with tokenyard.Buffer(group) as buffer:
            return checkpoint_state(jobs.make_model(buffer))

    (want,) = run_virtual(job, 1).results
    seen: set[str] = set()
    for state in run_virtual(job, num_ranks).results:
        seen |= state.keys()
        for name, tensor in state.items():
            assert_same(tensor, want[name], name)
    assert seen == want.keys()
    experts = [want[f"model.moe.experts.down.{e}"] for e in range(jobs.NUM_EXPERTS)]
    assert len({float(one.sum()) for one in experts}) == jobs.NUM_EXPERTS


def test_placement_and_shapes() -> None:
    """Experts where placement= says, tokens of any shape, ranks without tokens."""

    def job(group: Any, placed: bool) -> Tensor:
        placement = torch.tensor([1, 0, 2, 1, 0, 1]) if placed else None
        with tokenyard.Buffer(group, placement=placement) as buffer:
            layer = jobs.make_model(buffer).moe
            x = jobs.tokens(0, 1).view(2, 4, 3, jobs.HIDDEN)
            x = x if group.rank() == 1 else x[:0]
            out = layer(x)
            out.sum().backward()
            assert layer.router.weight.grad is not None
            assert out.shape == x.shape
            return out.detach()

    placed, even = (run_virtual(job, 3, flag).results[1] for flag in (True, False))
    torch.testing.assert_close(placed, even)


def test_bfloat16() -> None:
    def job(group: Any, dtype: torch.dtype) -> Tensor:
        config = RouterConfig(num_experts=4, num_topk=2)
        with tokenyard.Buffer(group) as buffer, torch.no_grad():
            layer = MoE(buffer, 16, 32, config, dtype=torch.bfloat16)
            for one in layer.parameters():
                one.copy_(torch.sin(torch.arange(one.numel())).view(one.shape) / 4)
            return layer.to(dtype)(jobs.tokens(0, 1).bfloat16().to(dtype))

    (narrow,) = run_virtual(job, 1, torch.bfloat16).results
    (wide,) = run_virtual(job, 1, torch.float32).results
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, atol=0.03, rtol=0.02)  # rounded 4 times


def test_activation_checkpointing() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            grads = []
            for again in (False, True):
                model = jobs.make_model(buffer)
                x = jobs.tokens(group.rank(), group.size())
                if again:
                    out = checkpoint(model, x, use_reentrant=False)
                else:
                    out = model(x)
                auxiliary = model.moe.auxiliary_loss + model.second.auxiliary_loss
                (out.square().mean() + auxiliary).backward()
                grads.append(list(jobs.gradients(model).values()))
            assert_same(grads[1], grads[0])

    run_virtual(job, 2)


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_without_a_graph_break(two_processes: Processes, backend: str) -> None:
    two_processes.run(jobs.compiled, backend, jobs.NUM_TOKENS)


@pytest.mark.processes
def test_graphs(two_processes: Processes) -> None:
    """One where sizes are fixed. Where they are not, dispatch_by_expert is left out of the two that
    remain, unless fullgraph=True, which makes torch take them too.
    """
    two_processes.run(jobs.compiled, "aot_eager", 0)
    assert two_processes.run(jobs.num_graphs, jobs.NUM_TOKENS) == [1, 1]
    assert two_processes.run(jobs.num_graphs, 0) == [2, 2]
