"""What surrounds vLLM's experts kernel, with the kernel itself, on virtual ranks."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM's own imports
    pytest.importorskip("vllm", reason="vllm is not installed")
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceDelegate,
        TopKWeightAndReduceNoOP,
    )
    from vllm.platforms import current_platform

    from tests.cases.vllm.layer import Case, through_layer
    from tokenyard.integrations.vllm import balance, hooks, manager, prepare_finalize
    from tokenyard.integrations.vllm.prepare_finalize import (
        ExchangingPrepareAndFinalize,
        LocalPrepareAndFinalize,
    )

from tests.cases.clock import scaled
from tokenyard.integrations.vllm.exchange import Exchange
from tokenyard.integrations.vllm.settings import Settings
from tokenyard.testing import Processes, assert_same, run_virtual

current_platform.import_kernels()
SETTINGS = Settings(enabled=True, transport="auto", timeout=scaled(60))
EXPERTS, TOPK, HIDDEN, INNER = 6, 3, 64, 32
UNQUANTISED = SimpleNamespace()
ONE_AT_A_TIME = threading.Lock()  # the kernel has one scratch space for all threads


def inputs(rank: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, HIDDEN, generator=random)
    ids = torch.rand(num_tokens, EXPERTS, generator=random).topk(TOPK).indices
    return x, torch.rand(ids.shape, generator=random), ids


def weights_of(experts: slice) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(99)
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=random) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=random) / INNER**0.5
    pack = ops.cpu_prepack_moe_weight
    return pack(w13[experts].contiguous(), "vec"), pack(w2[experts].contiguous(), "vec")


def kernel(x: Tensor, weights: Tensor, ids: Tensor, experts: slice, skip: bool = False) -> Tensor:
    """vLLM's, in float32, for so many of the experts."""
    out = torch.empty_like(x)
    if len(x):
        w13, w2 = weights_of(experts)
        ids = ids.to(torch.int32)
        with ONE_AT_A_TIME:
            ops.cpu_fused_moe(out, x, w13, w2, None, None, weights, ids, "silu", "vec", skip)
    return out


def assert_near(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).norm() <= 1e-6 * want.norm()  # float32 sums in another order


def expert_map(first: int, end: int) -> Tensor:
    ids = torch.full((EXPERTS,), -1, dtype=torch.int32)
    ids[first:end] = torch.arange(end - first, dtype=torch.int32)
    return ids


@pytest.mark.parametrize("tokens", [(7, 5), (7, 0), (1, 1)], ids=["both", "one idle", "decode"])
def test_travelling_tokens(tokens: tuple[int, int]) -> None:
    def job(group: Any) -> Tensor:
        exchange = Exchange(group, range(2), 2, SETTINGS)
        with exchange.buffer as buffer:
            around = ExchangingPrepareAndFinalize(exchange)
            mine = slice(3 * buffer.rank, 3 * buffer.rank + 3)
            x, weights, ids = inputs(buffer.rank, tokens[buffer.rank])
            rows, scales, _, row_ids, row_weights = around.prepare(
                x,
                weights,
                ids,
                EXPERTS,
                expert_map(mine.start, mine.stop),
                False,
                UNQUANTISED,
                True,
            )
            assert scales is None
            assert row_ids.shape == row_weights.shape == (len(rows), 1)
            y, out = kernel(rows, row_weights, row_ids, mine), torch.empty_like(x)
            around.finalize(out, y, row_weights, row_ids, False, TopKWeightAndReduceNoOP())
            return out

    for rank, got in enumerate(run_virtual(job, 2).results):
        x, weights, ids = inputs(rank, tokens[rank])
        assert_near(got, kernel(x, weights, ids, slice(EXPERTS)))


def test_same_tokens_on_all_ranks() -> None:
    x, weights, ids = inputs(0, 9)
    ids[::3, 0], weights[::3, 0] = -1, 0.0
    total = torch.zeros_like(x)
    for first in (0, 3):
        around, out = LocalPrepareAndFinalize(), torch.empty_like(x)
        rows, _, _, row_ids, row_weights = around.prepare(
            x, weights, ids, EXPERTS, expert_map(first, first + 3), False, UNQUANTISED, True
        )
        assert len(rows) == int(((ids >= first) & (ids < first + 3)).sum())  # none for -1
        y = kernel(rows, row_weights, row_ids, slice(first, first + 3))
        around.finalize(out, y, row_weights, row_ids, False, TopKWeightAndReduceNoOP())
        total += out
    assert_near(total, kernel(x, weights, ids.clamp(min=0), slice(EXPERTS)))


def test_the_output_may_be_what_the_kernel_wrote() -> None:
    """As vLLM has it if there are as many rows as tokens."""
    x, weights, ids = inputs(0, 9)
    weights, ids = weights[:, :1].contiguous(), ids[:, :1].contiguous()
    around = LocalPrepareAndFinalize()
    rows, _, _, row_ids, ones = around.prepare(
        x, weights, ids, EXPERTS, None, False, UNQUANTISED, True
    )
    out = kernel(rows, ones, row_ids, slice(EXPERTS))
    around.finalize(out, out, ones, row_ids, False, TopKWeightAndReduceNoOP())
    assert_near(out, kernel(x, weights, ids, slice(EXPERTS)))


def test_weights_on_the_input() -> None:
    """Top-k 1 alone, as vLLM has it; and a kernel that leaves its sums to others."""
    x, weights, ids = inputs(0, 9)
    weights, ids = weights[:, :1].contiguous(), ids[:, :1].contiguous()
    around, out = LocalPrepareAndFinalize(), torch.empty_like(x)
    rows, _, _, row_ids, row_weights = around.prepare(
        x, weights, ids, EXPERTS, None, True, UNQUANTISED, True
    )
    y = kernel(rows, row_weights, row_ids, slice(EXPERTS), skip=True)
    around.finalize(out, y[:, None], row_weights, row_ids, True, TopKWeightAndReduceDelegate())
    assert_near(out, kernel(x * weights, torch.ones_like(weights), ids, slice(EXPERTS)))
    with pytest.raises(ValueError, match="weights on the input with top-k 3, want top-k 1"):
        around.prepare(*inputs(0, 9), EXPERTS, None, True, UNQUANTISED, True)


@pytest.mark.parametrize("each", [True, False], ids=["a scale a token", "one scale"])
def test_quantised_rows(each: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts that undo it: 1 token on one rank looks like one scale, and must not be."""

    def quantise(a1: Tensor, scale: Any, **_: Any) -> tuple[Tensor, Tensor]:
        scales = a1.float().abs().amax(1, keepdim=True) / 127 if each else torch.tensor(0.05)
        return (a1 / scales).round().clamp(-127, 127).to(torch.int8), scales

    monkeypatch.setattr(prepare_finalize, "moe_kernel_quantize_input", quantise)
    config = SimpleNamespace(
        a1_scale=None, quant_dtype=torch.int8, per_act_token_quant=each, block_shape=None
    )

    def job(group: Any) -> Tensor:
        exchange = Exchange(group, range(2), 2, SETTINGS)
        with exchange.buffer as buffer:
            around = ExchangingPrepareAndFinalize(exchange)
            x, weights, ids = inputs(buffer.rank, (1, 4)[buffer.rank])
            x, weights = x.to(torch.bfloat16), torch.ones_like(weights)
            rows, scales, _, row_ids, ones = around.prepare(
                x, weights, ids, EXPERTS, None, False, config, False
            )
            assert rows.dtype == torch.int8
            y, out = (rows * scales).to(torch.bfloat16), torch.empty_like(x)
            around.finalize(out, y, ones, row_ids, False, TopKWeightAndReduceNoOP())
            return out

    for rank, got in enumerate(run_virtual(job, 2).results):
        x = inputs(rank, (1, 4)[rank])[0].to(torch.bfloat16)
        rows, scales = quantise(x, None)
        again = (rows * scales).to(torch.bfloat16)
        assert (got - TOPK * again).abs().max() <= 2**-7 * got.abs().max()  # bfloat16's rounding


def test_misplaced_experts_are_refused() -> None:
    def job(group: Any) -> str:
        exchange = Exchange(group, range(2), 2, SETTINGS)
        with exchange.buffer as buffer:
            around = ExchangingPrepareAndFinalize(exchange)
            elsewhere = expert_map(0, 3) if buffer.rank else expert_map(3, 6)
            with pytest.raises(ValueError) as caught:
                around.prepare(*inputs(0, 2), EXPERTS, elsewhere, False, UNQUANTISED, True)
            return str(caught.value)

    want = (
        "expert_map is [-1, -1, -1, 0, 1, 2], want experts in blocks by rank, [0, 1, 2, -1, -1, -1]"
    )
    assert run_virtual(job, 2).results[0] == want


def test_finalize_comes_after_prepare() -> None:
    out = torch.empty(1, HIDDEN)
    with pytest.raises(ValueError, match="finalize without a prepare before it"):
        LocalPrepareAndFinalize().finalize(out, out, out, out, False, TopKWeightAndReduceNoOP())


def test_micro_batches_are_refused() -> None:
    around = LocalPrepareAndFinalize()
    for turn in range(4):
        if turn % 2:
            with pytest.raises(ValueError, match=r"micro-batches .* are not supported"):
                around.prepare(*inputs(0, 2), EXPERTS, None, False, UNQUANTISED, True)
        else:
            around.prepare(*inputs(0, 2), EXPERTS, None, False, UNQUANTISED, True)


def test_results_do_not_depend_on_the_rank() -> None:
    """Ranks with the same tokens get the same bits."""

    def job(group: Any) -> Tensor:
        exchange = Exchange(group, range(2), 2, SETTINGS)
        with exchange.buffer:
            x, weights, ids = inputs(5, 6)
            arrived = exchange.send(x, ids, weights, EXPERTS)
            return exchange.send_back(arrived.x.sin(), arrived)

    first, second = run_virtual(job, 2).results
    assert_same(first, second)


class Manager:
    """As TokenyardManager: it knows which ranks have tokens of their own, and who has died."""

    def exchange(self, is_sequence_parallel: bool) -> Any:
        return SimpleNamespace(everyone=is_sequence_parallel)

    def explain(self, stage: str, error: RuntimeError) -> RuntimeError:
        return RuntimeError(f"{stage}: rank 1 died, and {error}")


def test_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM asks for in its own words is ours, unless a kernel routes by itself."""

    def broken(*_: Any) -> Tensor:
        raise RuntimeError("connection closed")

    utils, runner = hooks.all2all_utils, hooks.MoERunner
    around = "make_moe_prepare_and_finalize_"
    monkeypatch.setattr(utils, f"{around}naive_dp_ep", lambda *given: ("vLLM's", *given))
    monkeypatch.setattr(utils, f"{around}no_dp_ep", lambda *given: ("vLLM's", *given))
    monkeypatch.setattr(runner, "_select_forward", runner._select_forward)
    for name in ("process_weights_after_loading", "apply"):
        kernel = hooks.CPUUnquantizedExperts
        monkeypatch.setattr(kernel, name, getattr(kernel, name))
    monkeypatch.setattr(hooks.dp_utils, "_run_ar", broken)
    communicator = SimpleNamespace(all2all_manager=Manager())
    group = SimpleNamespace(device_communicator=communicator)
    monkeypatch.setattr(hooks, "get_ep_group", lambda: group)
    said: list[str] = []
    log = SimpleNamespace(info_once=lambda text, *given: said.append(given[0]))
    monkeypatch.setattr(balance, "_log", log)
    monkeypatch.setenv("TOKENYARD_VLLM_BALANCE", "exact")
    for _ in range(2):  # the second time changes nothing
        hooks.install()
    naive, local = (getattr(utils, around + name) for name in ("naive_dp_ep", "no_dp_ep"))
    for everyone in (False, True):
        made: Any = naive(False, is_sequence_parallel=everyone)
        assert isinstance(made, ExchangingPrepareAndFinalize)
        assert vars(made)["_exchange"].everyone is everyone
    assert isinstance(local(False), LocalPrepareAndFinalize)
    assert naive(True, True, 4) == ("vLLM's", True, True, 4)
    assert local(True) == ("vLLM's", True)
    same, routes = (
        "tensor parallel ranks have the same tokens, and nothing travels",
        "a kernel that",
    )
    assert said == [same, f"{routes} routes by itself gets the tokens of all ranks", same]
    for shared, name in ((None, "moe_forward"), (torch.nn.Identity(), "moe_forward_shared")):
        chosen = runner._select_forward(SimpleNamespace(_shared_experts=shared))
        assert chosen is getattr(torch.ops.vllm, name)
    with pytest.raises(RuntimeError, match="ranks: rank 1 died, and connection closed"):
        hooks.dp_utils._run_ar(False, 1, 1, 0, None)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    with Processes(2, timeout=scaled(240)) as processes:
        yield processes


BFLOAT16 = torch.bfloat16
BALANCED = {
    "float32": Case(),
    "bfloat16": Case(dtype=BFLOAT16),
    "biases": Case(dtype=BFLOAT16, has_bias=True),
    "padded": Case(inner=40, has_bias=True),
    "no whole pages": Case(dtype=BFLOAT16, hidden=32, inner=32, has_bias=True),
    "a tensor parallel rank": Case(ep_ranks=(1, 3), ep_size=4),
}


def assert_balanced(ranks: Processes, case: Case) -> None:
    plain, balanced = (ranks.run(through_layer, one, case) for one in ("", "exact"))
    before = [one["seen"][0][0] if one["seen"] else 0 for one in plain]
    mean = sum(before) / len(before)
    assert max(before) > 1.3 * mean
    num_experts = sum(one["shapes"]["w13_weight"][0] for one in plain)
    close = 2**-8 if case.dtype is BFLOAT16 else 1e-6
    for old, new in zip(plain, balanced):
        assert new["shapes"] == old["shapes"]  # a layer has its own weights, as before
        for num_rows, *known in new["seen"]:
            assert num_rows <= 1.01 * mean + 1
            assert known == [num_experts, num_experts]
        first, again, *others = new["out"]
        assert_same(again, first)
        for got, want in zip(new["out"], old["out"]):
            assert (got - want).float().norm() <= close * want.float().norm()
        assert not len(first) or not any(torch.equal(one, first) for one in others)


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", BALANCED.values(), ids=BALANCED)
def test_kernels_compute_with_the_experts_of_the_node(ranks: Processes, case: Case) -> None:
    assert_balanced(ranks, case)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_four_ranks_compute_for_each_other() -> None:
    with Processes(4, timeout=scaled(400)) as four:
        assert_balanced(four, Case(ep_ranks=(0, 1, 2, 3), ep_size=4, dtype=BFLOAT16))


def test_quantised_weights_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = SimpleNamespace(info_once=lambda text, *given: said.append(text % given))
    monkeypatch.setattr(balance, "_log", log)
    monkeypatch.setenv("TOKENYARD_VLLM_BALANCE", "0.05")
    monkeypatch.setattr(manager.All2AllManagerBase, "__init__", lambda *given: None)
    monkeypatch.setattr(manager, "get_pcp_group", lambda: SimpleNamespace(world_size=1))
    for quantised, want in ((None, 0.05), ("fp8", None)):
        model = SimpleNamespace(dtype=BFLOAT16, quantization=quantised)
        config = SimpleNamespace(model_config=model)
        monkeypatch.setattr(manager, "get_current_vllm_config", lambda config=config: config)
        assert vars(manager.TokenyardAll2AllManager(None))["_settings"].balance == want
    assert said == ["TOKENYARD_VLLM_BALANCE has no effect: weights are quantised (fp8)"]
