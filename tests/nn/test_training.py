"""What training does to a layer besides calling it: copies, loads, casts, freezes, evaluates."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import tokenyard
from tests.cases.clock import scaled
from tokenyard.nn import (
    MoE,
    RouterConfig,
    auxiliary_losses,
    average_expert_gradients,
    functional,
    prepare_for_ddp,
)
from tokenyard.testing import Processes, assert_same, run_virtual

HIDDEN = 16
_seeding = threading.Lock()


def make(buffer: tokenyard.Buffer, **options: Any) -> MoE:
    config = RouterConfig(num_experts=4, num_topk=2, **options)
    with _seeding:
        torch.manual_seed(0)
        return MoE(buffer, HIDDEN, 8, config)


def tokens(rank: int, num_tokens: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(num_tokens, HIDDEN, generator=generator)


def gradient_of_experts(model: nn.Module, experts: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [one.grad.clone() for one in experts.parameters()]


def test_experts_of_two_layers_are_averaged_once() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            first, second = make(buffer), make(buffer)
            second.experts = first.experts
            model = nn.Sequential(first, second)
            before = gradient_of_experts(model, first.experts, tokens(group.rank()))
            for _ in range(2):  # once more changes nothing
                average_expert_gradients(model)
                after = gradient_of_experts(model, first.experts, tokens(group.rank()))
                torch.testing.assert_close(after, [one / 2 for one in before])

    run_virtual(job, 2)


def test_parameters_that_are_replaced_are_still_averaged() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer, x = make(buffer), tokens(group.rank())
            average_expert_gradients(layer)
            want = gradient_of_experts(layer, layer.experts, x)
            state = {name: one.clone() for name, one in layer.state_dict().items()}
            layer.load_state_dict(state, assign=True)
            assert_same(gradient_of_experts(layer, layer.experts, x), want)
            layer.to("meta").to_empty(device="cpu")
            layer.load_state_dict(state)
            assert_same(gradient_of_experts(layer, layer.experts, x), want)

    run_virtual(job, 2)


@pytest.mark.parametrize("how", ["device=meta", "under torch.device"])
def test_a_layer_that_gets_its_memory_later(how: str) -> None:
    """It begins as one that had its memory from the start, whatever was in that memory."""

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            want = make(buffer, bias_rate=0.001)
            config = want.router.config
            if how == "device=meta":
                layer = MoE(buffer, HIDDEN, 8, config, device="meta")
            else:
                with torch.device("meta"):
                    layer = MoE(buffer, HIDDEN, 8, config)
            assert all(one.is_meta for one in (*layer.parameters(), *layer.buffers()))
            junk = [torch.full((4,), 1e9) for _ in range(200)]
            del junk  # memory that was used before
            layer.to_empty(device="cpu")
            assert not layer.router.load.any()  # which no checkpoint has
            layer.router.bias += 1.0
            layer.router.load += 1.0
            with _seeding:
                torch.manual_seed(0)
                layer.router.reset_parameters()
                layer.experts.reset_parameters()
            assert_same(list(layer.state_dict().values()), list(want.state_dict().values()))
            assert layer.router.bias.tolist() == layer.router.load.tolist() == [0.0] * 4
            layer.to_empty(device="cpu").load_state_dict(want.state_dict())
            assert not layer.router.load.any()

    run_virtual(job, 1)


@pytest.mark.parametrize("cast", ["to", "bfloat16", "half"])
def test_bias_and_load_stay_in_float32(cast: str) -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer = make(buffer, bias_rate=0.001)
            assert layer.router.bias is not None
            assert layer.router.load is not None
            layer.router.bias += 0.123
            layer.to(torch.bfloat16) if cast == "to" else getattr(layer, cast)()
            assert layer.router.weight.dtype != torch.float32
            assert layer.router.bias.tolist() == [pytest.approx(0.123, rel=1e-6)] * 4
            for _ in range(1000):
                layer.router.load.copy_(torch.tensor([0.0, 0.0, 1.0, 2.0]))
                layer.update_bias()
            assert layer.router.bias[0].item() == pytest.approx(1.123, abs=1e-3)
            layer.router.load += 300
            layer(tokens(0).to(layer.router.weight.dtype))
            assert layer.router.load.sum().item() == 4 * 300 + 6 * 2

    run_virtual(job, 1)


def test_a_bias_assigned_from_bfloat16_moves() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer = make(buffer, bias_rate=0.001)
            state = {name: one.to(torch.bfloat16) for name, one in layer.state_dict().items()}
            layer.load_state_dict(state, assign=True)
            for _ in range(600):
                assert layer.router.load is not None
                layer.router.load.copy_(torch.tensor([0.0, 0.0, 1.0, 2.0]))
                layer.update_bias()
            assert layer.router.bias is not None
            assert layer.router.bias[0].item() == pytest.approx(0.6, abs=1e-3)

    run_virtual(job, 1)


def test_autocast() -> None:
    """Products in bfloat16, as those of nn.Linear; parameters and gradients stay in float32."""

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer = make(buffer)
            model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), layer)
            x = tokens(group.rank())
            want = model(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = model(x)
                of_float32 = layer(x)
            assert got.dtype == of_float32.dtype == torch.bfloat16
            torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.02)
            got.float().square().sum().backward()
            grads = [one.grad for one in model.parameters()]
            assert all(one is not None and one.dtype == torch.float32 for one in grads)
            model.zero_grad()
            want.square().sum().backward()
            for one, grad in zip(model.parameters(), grads):
                assert one.grad is not None
                assert (one.grad - grad).norm() < 0.05 * one.grad.norm()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert copy.deepcopy(layer).double()(x.double()).dtype == torch.float64

    run_virtual(job, 2)


def test_bfloat16_rows_with_float32_experts() -> None:
    """As FSDP2's mixed precision has it, which leaves the experts alone."""

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer, x = make(buffer), tokens(group.rank())
            got = layer(x.to(torch.bfloat16))
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.float(), layer(x), rtol=0.05, atol=0.02)
            got.float().sum().backward()
            assert layer.experts.down.grad is not None
            assert layer.experts.down.grad.dtype == torch.float32

    run_virtual(job, 2)


def test_copies_use_the_same_buffer() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer, x = make(buffer, auxiliary_loss=0.1), tokens(group.rank())
            average_expert_gradients(layer)
            want = layer(x)
            twin = copy.deepcopy(layer)  # with a loss of the last call, which has a graph
            assert twin.buffer is buffer
            assert twin.auxiliary_loss is None
            assert_same(twin(x), want)
            assert_same(
                gradient_of_experts(twin, twin.experts, x),
                gradient_of_experts(layer, layer.experts, x),
            )
            mean = AveragedModel(layer)
            with torch.no_grad():
                layer.experts.down.mul_(2)
            assert_same(mean(x), want)
            mean.update_parameters(layer)
            mean.update_parameters(layer)
            assert not torch.equal(mean(x), want)

    run_virtual(job, 2)


def test_evaluation_has_no_auxiliary_loss() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer, x = make(buffer, auxiliary_loss=0.1), tokens(group.rank())
            layer(x)
            assert auxiliary_losses(layer) > 0
            layer.eval()(x)
            assert auxiliary_losses(layer) == 0.0

    run_virtual(job, 2)


def test_an_auxiliary_loss_without_its_gradient_is_refused() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer, x = make(buffer, auxiliary_loss=0.1), tokens(group.rank()).requires_grad_()
            y = checkpoint(layer, x, use_reentrant=True)
            with pytest.raises(RuntimeError, match="want use_reentrant=False"):
                auxiliary_losses(layer)
            with torch.no_grad():
                value = auxiliary_losses(layer)
                assert value > 0
            y.sum().backward()
            checkpoint(layer, x, use_reentrant=False)
            loss = auxiliary_losses(layer)
            assert isinstance(loss, Tensor)
            assert_same(loss.detach(), value)
            loss.backward()
            assert layer.router.weight.grad is not None
            layer.router.requires_grad_(False)  # nothing is lost
            checkpoint(layer, x, use_reentrant=True)
            assert auxiliary_losses(layer) > 0

    run_virtual(job, 1)


def test_experts_that_one_rank_trains_alone_are_told_of() -> None:
    def job(group: Any) -> str:
        with tokenyard.Buffer(group, timeout=scaled(60)) as buffer:
            layer, x = make(buffer), tokens(group.rank())
            layer.router.requires_grad_(False)
            layer.experts.requires_grad_(group.rank() == 0)
            with pytest.raises(
                tokenyard.CallMismatch, match="of combine_by_expert requires grad"
            ) as info:
                layer(x)
            return str(info.value)

    first, second = run_virtual(job, 2).results
    assert "on this rank and not on another" in first
    assert "on another rank and not on this one" in second


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,)])
def test_a_rank_without_sequences(shape: tuple[int, ...]) -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group, timeout=scaled(60)) as buffer:
            layer = make(buffer, auxiliary_loss=0.1, bias_rate=0.01)
            x = torch.ones(*shape, HIDDEN) if group.rank() else tokens(0)
            x.requires_grad_()
            y = layer(x)
            assert y.shape == x.shape
            (y.sum() + auxiliary_losses(layer)).backward()
            layer.update_bias()
            assert x.grad is not None
            for one in layer.parameters():
                assert one.grad is not None
                assert one.grad.isfinite().all()

    run_virtual(job, 2)


@pytest.mark.parametrize("shape", [(6, HIDDEN + 1), (HIDDEN - 1,), ()])
def test_another_hidden_size_is_refused_on_all_ranks(shape: tuple[int, ...]) -> None:
    def job(group: Any) -> str:
        with tokenyard.Buffer(group, timeout=scaled(60)) as buffer:
            layer = make(buffer)
            with pytest.raises(ValueError, match="want") as info:
                layer(torch.ones(shape) if group.rank() else tokens(0))
            layer(tokens(group.rank()))  # the Buffer still works
            return str(info.value)

    told, own = run_virtual(job, 2).results
    assert own == f"x is {list(shape)}, want [..., {HIDDEN}], on rank 1"
    assert told == f"rank 1 rejected its input, so no rank went on: {own}"


def under_ddp(group: Any, prepare: bool) -> str:
    with tokenyard.Buffer(group) as buffer:
        layer, x = make(buffer), tokens(group.rank())
        model = nn.Sequential(layer, nn.Linear(HIDDEN, 1))
        want = model(x).detach()
        model._ddp_params_and_buffers_to_ignore = ["0.router.weight"]  # type: ignore[assignment]
        if prepare:
            prepare_for_ddp(model)
        own = layer.experts.down.detach().clone()
        try:
            wrapped = nn.parallel.DistributedDataParallel(model)
        except RuntimeError as error:
            assert_same(layer.experts.down.detach(), own)
            return str(error)
        assert_same(wrapped(x).detach(), want)
        assert_same(layer.experts.down.detach(), own)
        assert "0.router.weight" in wrapped.parameters_to_ignore
        del wrapped
        return "nothing"


@pytest.mark.processes
def test_ddp_that_would_take_the_experts_is_found_out(two_processes: Processes) -> None:
    for text in two_processes.run(under_ddp, False):
        assert "copies rank 0's 0.experts.gate_up to all ranks" in text
    assert two_processes.run(under_ddp, True) == ["nothing"] * 2


def test_a_sum_over_ranks_has_the_same_bits_everywhere() -> None:
    def job(group: Any) -> tuple[Tensor, Tensor]:
        with tokenyard.Buffer(group) as buffer:
            x = tokens(group.rank())[0]
            rows = functional.gather_over_ranks(buffer, x)
            return rows, functional.sum_over_ranks(buffer, x)

    results = run_virtual(job, 3).results
    want = torch.stack([tokens(rank)[0] for rank in range(3)])
    for rows, total in results:
        assert_same(rows, want)
        assert_same(total, results[0][1])
        torch.testing.assert_close(total, want.sum(0))


def test_a_sum_over_ranks_has_a_gradient() -> None:
    """Each rank's x is in the sums of all, so its gradient is the sum of theirs."""

    def job(group: Any) -> Tensor:
        with tokenyard.Buffer(group) as buffer:
            x = tokens(group.rank())[0].requires_grad_()
            (functional.sum_over_ranks(buffer, x).sum() * (group.rank() + 1)).backward()
            assert x.grad is not None
            return x.grad

    for grad in run_virtual(job, 3).results:
        assert_same(grad, torch.full_like(grad, 1.0 + 2.0 + 3.0))
