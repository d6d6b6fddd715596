"""Twenty steps of a transformers model under each wrapper, as ranks make them; importable."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.cases.transformers.moe import SHAPE, whole_model
from tests.cases.wrappers.launched import launched

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of their own imports
    from accelerate import Accelerator, DistributedType
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

from tokenyard import Replicas
from tokenyard.integrations.accelerate import prepare_accelerator
from tokenyard.integrations.transformers import expert_parallel, prepare_trainer, save_pretrained
from tokenyard.integrations.transformers.lora import by_expert
from tokenyard.nn import (
    average_expert_gradients,
    checkpoint_state,
    clip_grad_norm_,
    expert_parameters,
    get_grad_norm,
    prepare_for_ddp,
    sum_replica_gradients,
)
from tokenyard.nn.share import named_own_parameters

NUM_STEPS, BATCH, LENGTH, MAX_NORM = 20, 4, 6, 1.0  # sequences of all ranks

Outcome = tuple[list[float], dict[str, Tensor]]


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Each token follows from the one before it."""

    def __init__(self, number: int = NUM_STEPS * BATCH) -> None:
        generator = torch.Generator().manual_seed(2)
        first = torch.randint(0, SHAPE["vocab_size"], (number, 1), generator=generator)
        self.tokens = (first + 5 * torch.arange(LENGTH)) % SHAPE["vocab_size"]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def batch(step: int, rank: int, num_ranks: int) -> Tensor:
    """Of the sequences in order, one for each rank in turn, as accelerate deals them."""
    mine = BATCH // num_ranks
    begin = step * BATCH + rank * mine
    return Sequences().tokens[begin : begin + mine]


LORA: dict[str, dict[str, Any]] = {
    "dense": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}
LORA["both"] = {**LORA["dense"], **LORA["experts"]}


def make_model(group: Any, lora: str = "", order: str = "before") -> Any:
    """Whole without a group. Adapters are the same whatever the ranks, and not zero."""
    model = whole_model("mixtral")
    if not lora:
        return model if group is None else expert_parallel(model, group)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, **LORA[lora])
    torch.manual_seed(7)
    whole = get_peft_model(model, config)
    for name, one in whole.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(one, std=0.02)
    if group is None:
        return whole
    if order == "before":
        return expert_parallel(whole, group)
    spread = get_peft_model(expert_parallel(whole_model("mixtral"), group), config)
    _copy(whole, spread)
    return spread


@torch.no_grad()
def _copy(whole: nn.Module, spread: nn.Module) -> None:
    """What was drawn for all experts, into adapters that PEFT made for this rank's."""
    given = dict(whole.named_parameters())
    own = {name: share for name, _, share in named_own_parameters(spread)}
    for name, one in spread.named_parameters():
        if "lora_" not in name:
            continue
        if name not in own:
            one.copy_(given[name])
            continue
        key = name[name.index("lora_") :]
        mine = by_expert(key, given[name], own[name].num_experts)[own[name].ids]
        mine_flat = mine.flatten(0, 1) if "lora_A" in key else mine.permute(1, 2, 0).flatten(1)
        one.copy_(mine_flat)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """By names that do not depend on the number of ranks: those that are trained."""
    own = {name: share for name, _, share in named_own_parameters(model)}
    named = {}
    for name, one in model.named_parameters():
        value = one.detach()
        if not one.requires_grad:
            continue
        if ".experts." not in name:
            named[name] = value.full_tensor() if isinstance(value, DTensor) else value
            continue
        ids = own[name].ids if name in own else list(range(8))
        if "lora_" in name:
            value = by_expert(name[name.index("lora_") :], value, len(ids))
        named.update({f"{name}.{e}": value[i] for i, e in enumerate(ids)})
    return named


def train(
    group: Any, kind: str, lora: str = "", order: str = "before", folder: str = ""
) -> Outcome:
    """A loop by hand, saved if there is a folder. kind "alone": no expert parallelism."""
    alone = kind == "alone"
    rank, num_ranks = (0, 1) if alone else (group.rank(), group.size())
    model = make_model(None if alone else group, lora, order)
    wrapped = model
    if lora == "experts":  # nothing is left for DistributedDataParallel
        average_expert_gradients(model)
    elif kind == "ddp":
        prepare_for_ddp(model)
        wrapped = DistributedDataParallel(model)
    elif kind == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer, ignored_params=expert_parameters(model))
        fully_shard(model, ignored_params=expert_parameters(model))
        average_expert_gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        tokens = batch(step, rank, num_ranks)
        loss = wrapped(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
    del wrapped
    if folder and alone:
        model.save_pretrained(folder)
    elif folder:
        save_pretrained(model, folder)
    return losses, parameters(model)


def with_accelerate(group: Any, alone: bool, precision: str = "no", lora: str = "") -> Outcome:
    with launched(None if alone else group):
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = make_model(None if alone else group, lora)
        prepare_accelerator(accelerator, model)
        loader: Any = torch.utils.data.DataLoader(
            Sequences(), batch_size=BATCH // accelerator.num_processes
        )
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        assert isinstance(wrapped, DistributedDataParallel) == (not alone and lora != "experts")
        losses = []
        for one in loader:
            optimizer.zero_grad()
            loss = wrapped(**one).loss
            accelerator.backward(loss)
            losses.append(loss.item())
            accelerator.clip_grad_norm_(wrapped.parameters(), MAX_NORM)
            optimizer.step()
        del wrapped
        return losses, parameters(model)


ACCUMULATED = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}


def with_trainer(
    group: Any, alone: bool, folder: str, lora: str = "", accumulates: bool = False
) -> Outcome:
    """Clipped by default, evaluated on an odd number of sequences, and saved."""
    with launched(None if alone else group):
        model = make_model(None if alone else group, lora)
        arguments = _arguments(folder, alone, **(ACCUMULATED if accumulates else {}))
        trainer = Trainer(model, arguments, None, Sequences())
        trainer.eval_dataset = Sequences(7)
        if not alone:
            prepare_trainer(trainer)
        trainer.train()
        losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.save_model(f"{folder}/saved")
        return losses, parameters(model)


def _arguments(folder: str, alone: bool, **more: Any) -> TrainingArguments:
    num_pieces = (1 if alone else 2) * more.get("gradient_accumulation_steps", 1)
    return TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=BATCH // num_pieces,
        per_device_eval_batch_size=2 if alone else 1,
        max_steps=NUM_STEPS,
        learning_rate=0.01,
        adam_epsilon=1e-3,  # a gradient that is nearly zero must not become a step of full size
        logging_steps=1,
        train_sampling_strategy="sequential",
        save_strategy="steps",
        save_steps=NUM_STEPS,
        save_only_model=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        **more,
    )


def told(group: Any, folder: str) -> dict[str, str]:
    """What is said where somebody forgot to prepare, or asks for what cannot be."""
    said = {}
    tokens = batch(0, group.rank(), group.size())
    model = make_model(group, "both", "after")
    with pytest.raises(RuntimeError) as raised:
        DistributedDataParallel(model)
    said["ddp around peft"] = str(raised.value)
    model = make_model(group)
    wrapped = DistributedDataParallel(model)
    with pytest.raises(RuntimeError) as raised:
        wrapped(input_ids=tokens)
    said["ddp without averages"] = str(raised.value)
    del wrapped, raised
    with launched(group):
        trainer = Trainer(make_model(group, "both", "after"), _arguments(folder, False))
        prepare_trainer(trainer)
        own = expert_parameters(trainer.model)
        for one in trainer.model.parameters():
            one.grad = torch.zeros_like(one)
        asked: dict[str, Callable[[], Any]] = {
            "peft's save_pretrained": lambda: trainer.model.save_pretrained(folder),
            "save_state": lambda: trainer.accelerator.save_state(folder),
            "resume": lambda: trainer._load_from_checkpoint(folder),
            "experts alone": lambda: trainer.accelerator.clip_grad_norm_(own, 1.0),
        }
        for name, change in {
            "checkpoints": {"save_only_model": False},
            "best": {"load_best_model_at_end": True},
        }.items():
            asked[name] = partial(_prepare_other, trainer, change)
        same = expert_parallel(whole_model("mixtral"), group, tokens="same")
        # accelerate leaves its FSDP out where there is no GPU.
        on_a_gpu = SimpleNamespace(distributed_type=DistributedType.FSDP)
        asked["accelerate's fsdp"] = partial(prepare_accelerator, on_a_gpu, model)
        on_a_gpu = copy.copy(trainer.accelerator)
        on_a_gpu.scaler = torch.amp.GradScaler("cpu")
        asked["float16"] = partial(prepare_accelerator, on_a_gpu, model)
        asked["checkpoint_state"] = partial(checkpoint_state, trainer.model)
        copies = Replicas([[0, 1, 2, 3, 4], [4, 5, 6, 7]])
        of_copies = expert_parallel(make_model(None, "experts"), group, placement=copies)
        asked["copies"] = partial(average_expert_gradients, of_copies)
        asked["copies' gradients"] = partial(sum_replica_gradients, of_copies)
        asked["copies' norm"] = partial(get_grad_norm, of_copies)
        asked["same tokens"] = partial(prepare_accelerator, trainer.accelerator, same)
        for name, ask in asked.items():
            with pytest.raises((RuntimeError, ValueError)) as refused:
                ask()
            said[name] = str(refused.value)
    with launched(None), pytest.raises(ValueError) as unlaunched:
        prepare_accelerator(Accelerator(cpu=True), model)
    said["no environment"] = str(unlaunched.value)
    return said


def _prepare_other(trainer: Trainer, change: dict[str, Any]) -> None:
    other = copy.copy(trainer)
    other.args = copy.copy(trainer.args)
    for key, value in change.items():
        setattr(other.args, key, value)
    prepare_trainer(other)
