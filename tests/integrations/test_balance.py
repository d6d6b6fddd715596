"""Models of transformers whose ranks compute with each other's experts."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.cases.clock import scaled
from tests.cases.processes import Pools
from tests.cases.transformers import moe as jobs
from tests.cases.transformers.families import tiny_model
from tests.cases.transformers.family_checks import inputs_of
from tokenyard.integrations.transformers import expert_parallel, from_pretrained, save_pretrained
from tokenyard.nn.share import shares
from tokenyard.testing import Processes, assert_same

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no shared memory"),
]
OPTIONS: dict[str, Any] = {"timeout": scaled(60), "balance": 0.0}
# Biases too; one module for each of two matrices; experts that are found by source, which stay.
FAMILIES = {"gpt_oss": True, "jetmoe": True, "switch_transformers": True, "llama4": False}


@pytest.fixture
def two(processes: Pools) -> Processes:
    return processes(2)


def evaluate(group: Any, family: str) -> tuple[bool, int]:
    """Whether all stacked parameters are shared, and how many pairs the ranks of the node had."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their configs
        plain = expert_parallel(tiny_model(family), group, timeout=scaled(60)).eval()
        model = expert_parallel(tiny_model(family), group, **OPTIONS).eval()
    given = inputs_of(model, group.rank())
    with torch.no_grad():
        want, got, again = (one(**given)[0] for one in (plain, model, model))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert_same(again, got)
    told: Any = model.tokenyard_buffer
    is_shared = all(share.stacks is not None for _, _, share in shares(model))
    return is_shared, told.stats()["balance"] is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_models_say_what_they_say_without_a_balance(two: Processes, family: str) -> None:
    for is_shared, is_balanced in two.run(evaluate, family):
        assert is_shared
        assert is_balanced == FAMILIES[family]


def generate(group: Any, path: str) -> None:
    """A loaded model, whose ranks generate together, and go on to train."""
    rank = group.rank()
    plain = expert_parallel(jobs.whole_model("qwen3_moe"), group, timeout=scaled(60))
    save_pretrained(plain, path)
    torch.distributed.barrier(group)
    kind = type(plain)
    model = from_pretrained(kind, path, group, buffer_options=OPTIONS).eval()
    ids = jobs.tokens_of(rank)
    more: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "synced_gpus": True}
    want, got = (one.generate(ids, **more) for one in (plain, model))
    assert_same(got, want)
    assert model.tokenyard_buffer.stats()["balance"]["borrowed_rows"] >= 0
    for (said, wants), (says, gets) in [(jobs.gradients(plain, ids), jobs.gradients(model, ids))]:
        assert_same(says, said)
        for name, one in wants.items():
            assert_same(gets[name], one)


def test_a_loaded_model_generates_and_trains(two: Processes, tmp_path: Path) -> None:
    two.run(generate, str(tmp_path))


def fine_tune(group: Any) -> None:
    """As a Trainer does: torch's fused AdamW, and checkpoints whose forward pass has no graph. An
    expert's biases are far smaller than a page.
    """
    trained = []
    for options in ({"timeout": scaled(60)}, OPTIONS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of their configs
            model = expert_parallel(tiny_model("gpt_oss"), group, **options).train()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        own = {name: one for _, part, _ in shares(model) for name, one in part.named_parameters()}
        assert len([name for name in own if name.endswith("bias")]) == 2
        assert all(one.is_contiguous() for one in own.values())
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
        given = inputs_of(model, group.rank())
        for _ in range(2):
            optimizer.zero_grad()
            model(**given)[0].float().square().mean().backward()
            optimizer.step()
        trained.append(dict(model.named_parameters()))
    want, got = trained
    for name, one in want.items():
        assert_same(got[name], one, name)


def test_a_model_with_biases_is_fine_tuned_as_without_a_balance(two: Processes) -> None:
    two.run(fine_tune)


def infer(group: Any) -> None:
    with torch.inference_mode():
        plain = expert_parallel(jobs.whole_model("mixtral"), group, timeout=scaled(60)).eval()
        model = expert_parallel(jobs.whole_model("mixtral"), group, **OPTIONS).eval()
        given = inputs_of(plain, group.rank())
        torch.testing.assert_close(model(**given)[0], plain(**given)[0], rtol=1e-4, atol=1e-5)


def test_a_model_may_be_made_in_inference_mode(two: Processes) -> None:
    two.run(infer)


def refuse(group: Any) -> list[str]:
    said = []

    def note(**options: Any) -> None:
        try:
            expert_parallel(jobs.whole_model("mixtral"), group, **OPTIONS, **options)
        except ValueError as error:
            said.append(str(error))

    note(tokens="same")
    note(share_experts=None if group.rank() == 0 else False)
    return said


def test_what_a_balance_cannot_do_is_refused(two: Processes) -> None:
    for same, unshared in two.run(refuse):
        assert 'with tokens="same" no rows move' in same
        assert "share_experts is False, and the Buffer has a balance" in unshared


def adapt(group: Any) -> list[str]:
    from peft import LoraConfig, get_peft_model

    around = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=around)
    said = []
    try:
        expert_parallel(get_peft_model(jobs.whole_model("mixtral"), config), group, **OPTIONS)
    except ValueError as error:
        said.append(str(error))
    model = get_peft_model(expert_parallel(jobs.whole_model("mixtral"), group, **OPTIONS), config)
    try:
        with torch.no_grad():
            model(jobs.tokens_of(group.rank()))
    except ValueError as error:
        said.append(str(error))
    return said


def test_adapters_of_experts_are_refused(two: Processes) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    for before, after in two.run(adapt):
        assert "an adapter of this rank's experts, which other ranks cannot read" in before
        assert "is not in the memory that ranks share" in after
