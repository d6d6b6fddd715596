"""What a rank does in the tests of `ep_implementation="tokenyard"`; importable by processes.

Each rank also runs the whole model, with the batches of all, and compares.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from tests.cases.transformers.families import classes_of
from tests.cases.wrappers.launched import launched
from tokenyard import PeerDied
from tokenyard.integrations.transformers import implementation
from tokenyard.nn import clip_grad_norm_, get_grad_norm

ALL_EXPERTS_FUNCTIONS.register("somebody's", grouped_mm_experts_forward)

# Sizes of a DistributedConfig, by what ranks have; a layout takes fsdp_size * tp_size ranks.
LAYOUTS: dict[str, dict[str, int]] = {
    "batches of their own": {"fsdp_size": 2, "ep_size": 2},
    "one batch": {"tp_size": 2, "ep_size": 2},
    "batches of their own, 4": {"fsdp_size": 4, "ep_size": 4},
    "one batch, 4": {"tp_size": 4, "ep_size": 4},
    "a batch for two, all experts": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
    "a batch for two, sharded experts": {"fsdp_size": 2, "tp_size": 2, "ep_size": 2},
    "sharded experts": {"fsdp_size": 4, "ep_size": 2},
}


def load(path: str, sizes: dict[str, int], kind: Any = AutoModelForCausalLM, **more: Any) -> Any:
    config = DistributedConfig(ep_implementation="tokenyard", **sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        return kind.from_pretrained(path, distributed_config=config, **more)


def batches_of(step: int, sizes: dict[str, int]) -> list[Tensor]:
    """One for each group of ranks that have the same."""
    generator = torch.Generator().manual_seed(step)
    whole = torch.randint(0, 90, (sizes.get("fsdp_size", 1), 2, 9), generator=generator)
    return list(whole)


def own_batch(group: Any, sizes: dict[str, int]) -> int:
    return group.rank() // sizes.get("tp_size", 1)


def whole_of(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def near(got: Any, want: Tensor, what: str, scale: float = 0.0, rtol: float = 2e-5) -> None:
    """Sums are made in another order, so float32's last bits differ. All ranks call this."""
    got = whole_of(got)
    assert got.shape == want.shape, what
    error, limit = float((got - want).norm()), rtol * max(float(want.norm()), scale)
    assert error <= limit, f"{what}: {error:.2g} from the whole model's, want {limit:.2g}"


def compare_gradients(model: nn.Module, whole: nn.Module) -> None:
    """Of every parameter: an expert that nobody chose has none on one process, zeros on many."""
    wanted = dict(whole.named_parameters())
    largest = max(float(one.grad.norm()) for one in wanted.values() if one.grad is not None)
    names = [name for name, _ in model.named_parameters()]
    assert names == list(wanted)
    for name, one in model.named_parameters():
        want = wanted[name].grad
        if one.grad is None:
            assert want is None or not want.any(), f"{name} has no gradient"
            continue
        want = torch.zeros_like(wanted[name]) if want is None else want
        near(one.grad, want, f"the gradient of {name}", 1e-2 * largest)


def run_step(group: Any, model: Any, whole: Any, sizes: dict[str, int], step: int) -> None:
    """Forward and backward of both: the loss and all gradients are those of one process."""
    batches, mine = batches_of(step, sizes), own_batch(group, sizes)
    losses = [whole(one, labels=one).loss for one in batches]
    torch.stack(losses).mean().backward()
    loss = model(batches[mine], labels=batches[mine]).loss
    loss.backward()
    near(loss.detach(), losses[mine].detach(), f"the loss of step {step}")
    compare_gradients(model, whole)


def train(group: Any, path: str, sizes: dict[str, int]) -> None:
    """Three steps of AdamW: losses, gradients and parameters are those of one process."""
    model, whole = load(path, sizes), AutoModelForCausalLM.from_pretrained(path)
    # As large an eps as this keeps steps smooth where a gradient is nearly nothing.
    optimisers = [
        torch.optim.AdamW(one.train().parameters(), lr=0.01, eps=1e-3, foreach=False)
        for one in (model, whole)
    ]
    for step in range(3):
        run_step(group, model, whole, sizes, step)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    for (name, one), (_, want) in zip(model.named_parameters(), whole.named_parameters()):
        near(one.detach(), want.detach(), name, rtol=1e-4)


MAX_NORM = 0.01  # far below the norms here


def clip(group: Any, path: str, sizes: dict[str, int]) -> tuple[float, str]:
    """One backward pass, clipped: the norm and all gradients are those of one process. Returns the
    norm, and what torch's own clipping said.
    """
    model, whole = load(path, sizes), AutoModelForCausalLM.from_pretrained(path)
    run_step(group, model, whole, sizes, 0)
    want = torch.nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
    assert want > 2 * MAX_NORM, "nothing is clipped, which proves nothing"
    with pytest.raises(RuntimeError) as refused:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    norm = clip_grad_norm_(model, MAX_NORM)
    near(norm, want, "the norm")
    compare_gradients(model, whole)
    near(get_grad_norm(model), torch.tensor(MAX_NORM), "the norm of what was clipped", rtol=1e-3)
    return norm.item(), str(refused.value)


class Look(TrainerCallback):
    """Notes the norm of Trainer's clipped gradients, and compares them with those of `whole`."""

    def __init__(self, whole: nn.Module) -> None:
        self.whole, self.has_compared = whole, False

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        compare_gradients(model, self.whole)
        self.has_compared = True


def clip_by_trainer(group: Any, path: str, sizes: dict[str, int], folder: str) -> str:
    """A step of Trainer, which clips by default. What accelerate says where it takes no such model.

    All ranks have one batch, so that it does not matter who is given which.
    """
    model, whole = load(path, sizes), AutoModelForCausalLM.from_pretrained(path)
    batch, look = batches_of(0, sizes)[0], Look(whole)
    whole(batch, labels=batch).loss.backward()
    want = torch.nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
    with launched(group):
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=len(batch),
            max_steps=1,
            max_grad_norm=MAX_NORM,
            logging_steps=1,
            save_strategy="no",
            train_sampling_strategy="sequential",
            report_to=[],
            disable_tqdm=True,
        )
        data: Any = [{"input_ids": one, "labels": one} for one in batch] * group.size()
        try:
            trainer = Trainer(model, arguments, None, data, callbacks=[look])
        except ValueError as error:
            return str(error)
        trainer.train()
    norms = [one["grad_norm"] for one in trainer.state.log_history if "grad_norm" in one]
    near(torch.tensor(norms), want[None], "Trainer's norm")
    assert look.has_compared
    return ""


def forward_and_backward(group: Any, path: str, family: str) -> None:
    """What transformers' own tests of expert parallelism ask: one batch, three ways of experts."""
    kind, size = classes_of(family)[0], group.size()
    for way in ("eager", "grouped_mm", "batched_mm"):
        model = load(path, {"tp_size": size, "ep_size": size}, kind)
        whole = kind.from_pretrained(path)
        for one in (model, whole):
            one.set_experts_implementation(way)
        input_ids = torch.randint(2, 90, (2, 12), generator=torch.Generator().manual_seed(1))
        got, want = (one(input_ids, use_cache=False) for one in (model, whole))
        near(got.logits.detach(), want.logits.detach(), f"{way}: logits", rtol=1e-4)
        for out in (got, want):
            whole_of(out.logits).float().square().mean().backward()
        compare_gradients(model, whole)


def infer(group: Any, path: str, sizes: dict[str, int]) -> None:
    """Generation, and bfloat16, which is as far from float32 as one process' is."""
    model, whole = load(path, sizes).eval(), AutoModelForCausalLM.from_pretrained(path).eval()
    prompt = batches_of(0, sizes)[own_batch(group, sizes)]
    got, want = (one.generate(prompt, max_new_tokens=12, do_sample=False) for one in (model, whole))
    assert got.tolist() == want.tolist()
    want = whole(prompt).logits
    alone = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)(prompt).logits
    spread = whole_of(load(path, sizes, dtype=torch.bfloat16)(prompt).logits)
    assert spread.dtype is torch.bfloat16
    assert (spread - want).norm() <= 1.5 * (alone - want).norm()


def compile_it(group: Any, path: str, sizes: dict[str, int]) -> None:
    model, whole = load(path, sizes), AutoModelForCausalLM.from_pretrained(path)
    for layer in model.model.layers:
        layer.mlp.compile(backend="aot_eager")
    for step in range(2):
        run_step(group, model, whole, sizes, step)
        for one in (model, whole):
            one.zero_grad()


def share_a_buffer(group: Any, path: str, sizes: dict[str, int]) -> list[int]:
    """How many Buffers there are: with a model, with two, and after both."""
    gc.collect()  # of earlier tests
    first = load(path, sizes)
    seen = [len(implementation._buffers)]
    second = load(path, sizes)
    seen.append(len(implementation._buffers))
    batch = batches_of(0, sizes)[own_batch(group, sizes)]
    assert torch.equal(*(whole_of(one(batch).logits) for one in (first, second)))
    del first, second
    gc.collect()
    return [*seen, len(implementation._buffers)]


def save(group: Any, path: str, sizes: dict[str, int], to: str) -> None:
    load(path, sizes).save_pretrained(to)


def run_kind(group: Any, experts: Any, way: str, same: bool, all_to: int | None) -> None:
    """An experts module against the whole one: what it says, and every gradient.

    all_to: the expert that all tokens choose, so that other ranks get no row.
    """
    rank, size = group.rank(), group.size()
    experts.config._experts_implementation = way
    stacked = [name for name, _ in experts.named_parameters() if "norm" not in name]
    plan = {f"experts.{name}": "grouped_gemm" for name in stacked}
    plan["experts"] = "ep_dispatch_experts"
    whole = nn.ModuleDict({"experts": experts})
    model = copy.deepcopy(whole)
    shape = (1, size) if same else (size, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "tp"))
    ep_mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    apply_expert_parallelism(model, ep_mesh, mesh["tp"], plan, "tokenyard")

    def step(module: nn.ModuleDict, which: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(which)
        x = torch.randn(6 + which, 16, generator=generator, requires_grad=True)
        weights, topk_idx = torch.rand(6 + which, 4, generator=generator).topk(2)
        if all_to is not None:
            topk_idx = torch.tensor([all_to, all_to + 1]).expand(6 + which, 2).contiguous()
        weights.requires_grad_()
        out = module["experts"](x, topk_idx, weights)
        out.square().sum().backward()
        assert x.grad is not None
        assert weights.grad is not None
        return out.detach(), x.grad, weights.grad

    wants = [step(whole, which) for which in range(1 if same else size)]
    names = "what it says", "the gradient of tokens", "the gradient of weights"
    gots = step(model, 0 if same else rank)
    for name, got, want in zip(names, gots, wants[0 if same else rank]):
        near(got, want, name)
    for (name, one), (_, want) in zip(model.named_parameters(), whole.named_parameters()):
        grad = torch.zeros_like(one) if one.grad is None else one.grad
        if "norm" in name:  # each rank has a part
            dist.all_reduce(grad)
        assert want.grad is not None
        near(grad, want.grad, f"the gradient of {name}", 1.0)


def die(group: Any, path: str, sizes: dict[str, int]) -> tuple[str, tuple[int, ...], float]:
    """Rank 1 dies between two layers of its second step: what the others say, and how late."""
    model = load(path, sizes)
    batch = batches_of(0, sizes)[own_batch(group, sizes)]
    model(batch, labels=batch).loss.backward()
    if group.rank() == 1:
        experts = model.model.layers[1].mlp
        experts.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    begin = time.monotonic()
    try:
        model(batch, labels=batch).loss.backward()
    except PeerDied as error:
        return type(error).__name__, error.ranks, time.monotonic() - begin
    return "nothing", (), 0.0
