"""Expert parallelism in transformers models: what one process with all experts gives."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import load_file
from torch import nn
from transformers import MixtralForCausalLM
from transformers.models.aria.modeling_aria import AriaExperts, AriaTextConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHExperts

from tests.cases.clock import scaled
from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tests.cases.transformers import moe as jobs
from tokenyard import Replicas
from tokenyard.integrations.transformers import expert_parallel, experts_forward
from tokenyard.testing import Processes, assert_same, run_processes, run_virtual

pytestmark = pytest.mark.processes

KINDS = pytest.mark.parametrize("kind", jobs.MODELS)
TOKENS = pytest.mark.parametrize("tokens", ["own", "same"])


@pytest.fixture(params=at_night([1, 2, 4], gate=(2,)), ids=lambda n: f"{n}-ranks")
def ranks(request: Any, processes: Pools) -> Processes:
    return processes(request.param)


@pytest.fixture
def two_ranks(processes: Pools) -> Processes:
    return processes(2)


@cache
def one_process(kind: str, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """All experts, one rank's tokens."""
    return jobs.gradients(jobs.whole_model(kind), jobs.tokens_of(rank))


def assert_near(got: Tensor, want: Tensor, what: str) -> None:
    """Sums are made in another order, so float32's last bits differ."""
    assert got.shape == want.shape, what
    assert (got - want).norm() <= 1e-5 * want.norm().clamp(min=1e-4), what


@TOKENS
@KINDS
def test_logits_and_gradients(ranks: Processes, kind: str, tokens: Any) -> None:
    check_training(ranks.run(jobs.train, kind, tokens), kind, tokens)


def check_training(results: list[Any], kind: str, tokens: Any) -> None:
    num_ranks = len(results)
    alone = [one_process(kind, rank if tokens == "own" else 0) for rank in range(num_ranks)]
    for (logits, _), (want, _) in zip(results, alone):
        assert want.abs().max() > 1
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5)
    check_gradients([grads for _, grads in results], [grads for _, grads in alone], kind, tokens)


def check_gradients(
    results: list[dict[str, Tensor]], alone: list[dict[str, Tensor]], kind: str, tokens: Any
) -> None:
    num_ranks = len(results)
    num_sliced = 0
    for name, first in alone[0].items():
        got = [grads[name] for grads in results]
        if tokens == "own":  # the loss is the sum of all ranks' losses
            want = torch.stack([grads[name] for grads in alone]).sum(0)
        else:
            want = first
        if ".experts." in name and ".shared_experts." not in name:
            num_sliced += 1
            assert [len(one) for one in got] == [8 // num_ranks] * num_ranks
            assert_near(torch.cat(got), want, name)
        elif tokens == "own":
            assert_near(torch.stack(got).sum(0), want, name)
        else:
            for one in got:
                assert_near(one, want, name)
    assert num_sliced == (2 if kind == "deepseek_v3" else 4)


@TOKENS
def test_gradients_of_gradients(two_ranks: Processes, tokens: Any) -> None:
    results = two_ranks.run(jobs.train_twice, "mixtral", tokens)
    alone = [
        jobs.penalised(jobs.whole_model("mixtral"), jobs.tokens_of(rank if tokens == "own" else 0))
        for rank in range(2)
    ]
    check_gradients(results, alone, "mixtral", tokens)


@KINDS
def test_generation(ranks: Processes, kind: str) -> None:
    for got in ranks.run(jobs.generate, kind, "same", 64):
        assert got.tolist() == generated(kind, 0).tolist()


@KINDS
def test_generation_of_own_tokens(two_ranks: Processes, kind: str) -> None:
    for rank, got in enumerate(two_ranks.run(jobs.generate, kind, "own", 64)):
        assert got.tolist() == generated(kind, rank).tolist()


@KINDS
def test_generation_prepares_its_exchange(two_ranks: Processes, kind: str) -> None:
    """By itself, and nobody notices: the same bits, of whatever somebody keeps."""
    want = two_ranks.run(jobs.generate_and_keep, kind, "ordinary")
    for how in ("prepared", "half"):
        for rank, (got, due) in enumerate(
            zip(two_ranks.run(jobs.generate_and_keep, kind, how), want)
        ):
            is_taken = how == "prepared" or rank == 0
            assert got[0] == len(due[3]) * is_taken >= 12 * is_taken
            assert_same(got[1:], due[1:])


@cache
def generated(kind: str, rank: int) -> Tensor:
    tokens = jobs.continued(jobs.whole_model(kind), rank, 64)
    assert len(tokens[0, -64:].unique()) > 3, "it says the same all the time, which proves nothing"
    return tokens


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    paths = {kind: str(tmp_path_factory.mktemp("saved") / kind) for kind in jobs.MODELS}
    for kind, path in paths.items():
        jobs.whole_model(kind).save_pretrained(path)
    return paths


@pytest.mark.parametrize("auto", [False, True], ids=["class", "auto"])
@KINDS
def test_from_pretrained(
    two_ranks: Processes, saved: dict[str, str], kind: str, auto: bool
) -> None:
    tokens = "same" if auto else "own"
    check_training(two_ranks.run(jobs.load, saved[kind], auto, tokens), kind, tokens)


def test_loading_info(two_ranks: Processes, saved: dict[str, str]) -> None:
    _, want = MixtralForCausalLM.from_pretrained(saved["mixtral"], output_loading_info=True)
    for is_spread, info in two_ranks.run(jobs.loading_info, saved["mixtral"]):
        assert is_spread
        assert info == want


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "placement"])
@KINDS
def test_save_pretrained(
    two_ranks: Processes, saved: dict[str, str], tmp_path: Path, kind: str, uneven: bool
) -> None:
    own_way = two_ranks.run(jobs.save, kind, str(tmp_path), uneven)
    assert (tmp_path / "config.json").read_text() == Path(saved[kind], "config.json").read_text()
    want = load_file(Path(saved[kind], "model.safetensors"))
    got = load_file(tmp_path / "model.safetensors")
    assert got.keys() == want.keys()
    for name, one in want.items():
        assert_same(got[name], one)
    layer = 1 if kind == "deepseek_v3" else 0
    assert own_way == 2 * [
        f"save_pretrained: this rank has a part of the experts of model.layers.{layer}.mlp.experts"
        ", want tokenyard.integrations.transformers.save_pretrained(model, path), on all ranks"
    ]


def test_what_was_saved_can_be_loaded_at_once(two_ranks: Processes, tmp_path: Path) -> None:
    for before, after in two_ranks.run(jobs.save_and_load, "mixtral", str(tmp_path / "new")):
        assert_same(after, before)
    assert [one.name for one in tmp_path.iterdir()] == ["new"]  # nothing is left beside it


def test_saving_leaves_no_weights_of_before(two_ranks: Processes, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for many, one in two_ranks.run(jobs.save_twice, "mixtral", str(tmp_path)):
        assert "model-00001-of-" in many
        assert "model.safetensors.index.json" in many
        assert one == "config.json generation_config.json model.safetensors notes.txt"


def test_saving_that_fails_fails_on_all_ranks(two_ranks: Processes, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    own, told = two_ranks.run(
        jobs.save_where_a_file_is, "mixtral", str(tmp_path / "file" / "model")
    )
    assert own.startswith(("FileExistsError", "NotADirectoryError"))
    assert told == f"PeerInputError: save_pretrained failed on rank 0, so no rank went on: {own}"


def test_a_folder_that_one_rank_has_not(two_ranks: Processes, saved: dict[str, str]) -> None:
    path = saved["mixtral"]
    told, own = two_ranks.run(jobs.load_what_one_has, path)
    missing = f"path is '{path}-gone', which is not there, want a folder with a checkpoint"
    assert own == f"ValueError: {missing}"
    assert told == (f"PeerInputError: from_pretrained failed on rank 1, so no rank went on: {own}")


@pytest.mark.parametrize(
    "case", at_night([(7, 2, "own"), (10, 4, "own"), (10, 4, "same")], gate=[(7, 2, "own")])
)
def test_experts_that_ranks_do_not_divide(processes: Pools, tmp_path: Path, case: Any) -> None:
    number, num_ranks, tokens = case
    model = jobs.whole_model("mixtral", num_local_experts=number)
    model.save_pretrained(tmp_path)
    want = model(jobs.tokens_of(0)).logits.detach()
    results = processes(num_ranks).run(jobs.load_few_experts, str(tmp_path), tokens)
    assert [one for ids, _ in results for one in ids] == list(range(number))
    for ids, logits in results:
        assert ids
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_loading_takes_the_memory_of_its_experts(tmp_path: Path) -> None:
    path = str(tmp_path / "large")
    large = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 32}
    model = jobs.whole_model("qwen3_moe", num_hidden_layers=4, **large)
    experts = sum(one.nbytes for one in expert_parameters(model).values())
    rest = sum(one.nbytes for one in model.parameters()) - experts
    model.save_pretrained(path)
    alone = run_processes(jobs.bytes_to_load, 1, path, True)[0]
    assert experts > 190e6
    assert alone[1] == experts + rest
    # Four processes import transformers at once.
    for grown, held in run_processes(jobs.bytes_to_load, 4, path, False, timeout=scaled(120)):
        assert held == experts // 4 + rest
        assert grown < alone[0] - experts // 2, "more than half of the experts at once"


def gpt_oss() -> nn.Module:
    """Biases, transposed, and a gate of its own."""
    return GptOssExperts(GptOssConfig(num_local_experts=5, hidden_size=16, intermediate_size=12))


def nemotron_h() -> nn.Module:
    """No gate."""
    return NemotronHExperts(
        NemotronHConfig(n_routed_experts=5, hidden_size=16, moe_intermediate_size=12)
    )


def aria() -> nn.Module:
    """Transposed."""
    return AriaExperts(AriaTextConfig(moe_num_experts=5, hidden_size=32, intermediate_size=12))


def muse_like() -> nn.Module:
    """A norm after each expert."""
    experts: Any = gpt_oss()
    experts.has_post_expert_norm, experts.post_expert_norm = True, nn.RMSNorm(16)
    return experts


def block(make: Any) -> nn.ModuleDict:
    generator = torch.Generator().manual_seed(3)  # virtual ranks share the global one
    experts = make()
    experts.config._experts_implementation = "grouped_mm"
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return nn.ModuleDict({"experts": experts})


def step(module: nn.Module, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the gradients of tokens and weights; parameters get theirs too."""
    generator = torch.Generator().manual_seed(rank)
    hidden = 32 if isinstance(module, AriaExperts) else 16
    x = torch.randn(6 + rank, hidden, generator=generator, requires_grad=True)
    weights, topk_idx = torch.rand(6 + rank, 5, generator=generator).topk(2)
    weights.requires_grad_()
    out = module(x, topk_idx, weights)
    out.square().sum().backward()
    return out.detach(), x.grad, weights.grad


PLACEMENTS = {"even": None, "placed": torch.tensor([2, 0, 1, 0, 2])}


@TOKENS
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("make", [gpt_oss, nemotron_h, aria, muse_like])
def test_kinds_of_experts(make: Any, placement: str, tokens: Any) -> None:
    """Five experts on three ranks."""
    where = PLACEMENTS[placement]
    rank_of = [0, 0, 1, 1, 2] if where is None else where.tolist()

    def job(group: Any) -> tuple[Any, dict[str, Tensor]]:
        model = expert_parallel(block(make), group, tokens=tokens, placement=where)
        got = step(model["experts"], group.rank() if tokens == "own" else 0)
        return got, {name: one.grad for name, one in model["experts"].named_parameters()}

    results = run_virtual(job, 3).results
    whole = block(make)["experts"]
    for rank, (got, _) in enumerate(results):
        if tokens == "same":
            whole.zero_grad()
        for one, want in zip(got, step(whole, rank if tokens == "own" else 0)):
            assert_near(one, want, "outputs and gradients of inputs")
    for name, parameter in whole.named_parameters():
        for rank, (_, grads) in enumerate(results):
            if name.startswith("post_expert_norm"):  # whole on all ranks
                got = grads[name] if tokens == "same" else sum(one[name] for _, one in results)
                assert_near(got, parameter.grad, name)
                continue
            owned = [expert for expert in range(5) if rank_of[expert] == rank]
            assert_near(grads[name], parameter.grad[owned], name)


def test_holds_only_its_experts() -> None:
    def job(group: Any) -> tuple[int, int, list[str]]:
        whole = jobs.whole_model("mixtral")
        storages = [one.untyped_storage() for one in expert_parameters(whole).values()]
        full = sum(one.nbytes() for one in storages)
        before = storages[0]._weak_ref()
        del storages
        model = expert_parallel(whole, group)
        assert torch.UntypedStorage._expired(before), "the whole is still there"
        torch.UntypedStorage._free_weak_ref(before)
        kept = expert_parameters(model)
        return full, sum(one.untyped_storage().nbytes() for one in kept.values()), list(kept)

    for full, kept, names in run_virtual(job, 4).results:
        assert kept * 4 == full
        assert len(names) == 4


def expert_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: one for name, one in model.named_parameters() if ".experts." in name}


def test_leaves_the_config_of_others_alone() -> None:
    whole = jobs.whole_model("qwen3_moe")
    other = type(whole)(whole.config)
    input_ids = jobs.tokens_of(0)
    want = other(input_ids).logits
    run_virtual(lambda group: expert_parallel(whole, group), 1)
    torch.testing.assert_close(other(input_ids).logits, want, rtol=0, atol=0)


def test_data_parallel_that_nobody_prepared(two_ranks: Processes) -> None:
    """DistributedDataParallel would mean all gradients but those of the experts, which are sums."""
    results = two_ranks.run(jobs.ddp_that_nobody_prepared, "mixtral")
    for rank, (logits, said) in enumerate(results):
        want, _ = one_process("mixtral", rank)
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5)  # as in the test below
        assert "those of MixtralExperts are sums: want tokenyard.nn.average_expert_grad" in said


def test_prepared_for_data_parallelism(two_ranks: Processes) -> None:
    """Experts stay where they are, and the gradients of all parameters are those of the mean."""
    results = two_ranks.run(jobs.ddp_after_prepare, "mixtral")
    assert all(kept for kept, _, _ in results)
    alone = [one_process("mixtral", rank) for rank in range(2)]
    for (_, logits, _), (want, _) in zip(results, alone):
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5)
    for name in alone[0][1]:
        mean = (alone[0][1][name] + alone[1][1][name]) / 2
        if ".experts." in name:
            assert_near(torch.cat([grads[name] for _, _, grads in results]), mean, name)
        else:
            for _, _, grads in results:
                assert_near(grads[name], mean, name)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_a_batch_without_tokens_on_one_rank(two_ranks: Processes, shape: tuple[int, int]) -> None:
    begin = time.monotonic()
    told, own = two_ranks.run(jobs.no_tokens_on_one_rank, "mixtral", shape)
    assert time.monotonic() - begin < scaled(50), "ranks waited until their time was up"
    assert own.startswith("RuntimeError: cannot reshape tensor of 0 elements")
    assert told.startswith("PeerInputError: rank 1 rejected its input")
    assert "the batch has no tokens, want some on every rank, on rank 1" in told


@TOKENS
def test_a_copy_is_a_model_of_its_own(two_ranks: Processes, tokens: Any) -> None:
    for rank, (before, after) in enumerate(two_ranks.run(jobs.copied, "mixtral", tokens)):
        want, _ = one_process("mixtral", rank if tokens == "own" else 0)
        torch.testing.assert_close(before, want, rtol=0, atol=1e-5)
        assert_same(after, before)


def test_ranks_that_want_different_numbers_of_tokens(two_ranks: Processes) -> None:
    results = two_ranks.run(jobs.generate_unequally, "mixtral")
    for rank, got in enumerate(results):
        want = generated("mixtral", rank)[:, : jobs.tokens_of(rank).shape[1] + 3 + 4 * rank]
        assert got.tolist() == want.tolist()


def test_ranks_that_make_other_numbers_of_passes(two_ranks: Processes) -> None:
    nothing, told = two_ranks.run(jobs.generate_and_leave, "mixtral")
    assert nothing == "nothing"
    assert "rank 0 closed its Buffer" in told
    assert told.endswith("generate(synced_gpus=True) does so")


def quantised() -> nn.Module:
    """As transformers' FP8Experts: narrow weights, and scales beside them."""
    experts: Any = gpt_oss()
    narrow = experts.down_proj.detach().to(torch.float8_e4m3fn)
    experts.down_proj = nn.Parameter(narrow, requires_grad=False)
    return nn.ModuleDict({"experts": experts})


def without_parameters() -> nn.Module:
    """As FullyShardedDataParallel leaves it, which takes them away."""
    experts = gpt_oss()
    experts._parameters.clear()
    return nn.ModuleDict({"experts": experts})


BAD = {
    "fp8": (
        lambda group: expert_parallel(quantised(), group),
        "experts.down_proj is torch.float8_e4m3fn, want float32, bfloat16, float16 or float64: the "
        "experts as they were before they were quantised, by dequantize=True of a "
        "quantization_config that has it",
    ),
    "sharded": (
        lambda group: expert_parallel(without_parameters(), group),
        "experts has no parameters, want a model that nothing has sharded yet",
    ),
    "no-experts": (
        lambda group: expert_parallel(nn.Linear(2, 2), group),
        "Linear has no experts that transformers runs through ALL_EXPERTS_FUNCTIONS, and none that "
        "there is an adapter for, want an MoE model",
    ),
    "twice": (
        lambda group: expert_parallel(expert_parallel(block(gpt_oss), group), group),
        "experts is expert parallel already, want a model that is not",
    ),
    "tokens": (
        lambda group: expert_parallel(block(gpt_oss), group, tokens="all"),  # type: ignore[arg-type]
        "tokens is 'all', want one of ('own', 'same')",
    ),
    "idle-rank": (
        lambda group: expert_parallel(
            block(gpt_oss), group, placement=torch.tensor([0, 0, 0, 0, 0])
        ),
        "rank 1 has none of the 5 experts of experts, want at least one on each of 2 ranks",
    ),
    "placement": (
        lambda group: expert_parallel(block(gpt_oss), group, placement=torch.tensor([0, 1])),
        "placement has 2 experts, want 5, experts's",
    ),
    "no-buffer": (
        lambda group: experts_forward(gpt_oss(), *[torch.zeros(1, 1)] * 3),
        "GptOssExperts has no Buffer, want a model that was given to "
        "tokenyard.integrations.transformers.expert_parallel",
    ),
    "different-tokens": (
        lambda group: step(
            expert_parallel(block(gpt_oss), group, tokens="same")["experts"], group.rank()
        ),
        "rank 0 has 6 tokens and others have not: want the same on all ranks, or else "
        "tokens='own' or an fsdp_size",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_says_what_is_wrong(case: str) -> None:
    job, message = BAD[case]
    with pytest.raises(ValueError) as caught:
        run_virtual(job, 2)
    assert str(caught.value) == message


@TOKENS
def test_refuses_functional_gradients(tokens: Any) -> None:
    def job(group: Any) -> None:
        experts = expert_parallel(block(gpt_oss), group, tokens=tokens)["experts"]
        topk_idx, weights = torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2)
        torch.func.grad(lambda x: experts(x, topk_idx, weights).sum())(torch.ones(1, 16))

    with pytest.raises(NotImplementedError, match=r"does not work inside torch\.func\.grad"):
        run_virtual(job, 2)


def test_experts_move_while_a_model_is_trained(two_ranks: Processes) -> None:
    """Copies come, move and go; logits and weights are those of experts that stay."""
    halves = torch.arange(8) // 4
    moving = [
        Replicas([[0, 1, 2, 3], [4, 5, 6, 7, 0]]),
        Replicas([[7, 5, 0, 2, 6], [4, 1, 3, 6]]),
        halves.flip(0),
    ]
    still = two_ranks.run(jobs.train_while_experts_move, [halves, None, None])
    moved = two_ranks.run(jobs.train_while_experts_move, moving)
    for (want, _), (got, _) in zip(still, moved):
        for one, other in zip(want, got):
            assert_near(other, one, "logits")
    wanted, found = still[0][1], moved[0][1]
    assert wanted.keys() == found.keys()
    for name, one in wanted.items():
        assert_near(found[name], one, name)


def test_experts_of_the_same_tokens_stay(two_ranks: Processes) -> None:
    two_ranks.run(jobs.refuse_to_move)
