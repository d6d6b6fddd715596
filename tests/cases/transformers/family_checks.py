"""A tiny model of a family, spread over two virtual ranks, against one process with all experts."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tests.cases.transformers.families import tiny_model
from tokenyard.integrations.transformers import expert_parallel
from tokenyard.integrations.transformers.adapters import unstack
from tokenyard.integrations.transformers.spread import find_experts
from tokenyard.nn.share import shares
from tokenyard.testing import run_virtual

NUM_RANKS = 2
WORKS, REFUSED, BROKEN = "works", "refused", "fails in transformers"


def inputs_of(model: Any, rank: int) -> dict[str, Tensor]:
    """Ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(100 + rank)
    input_ids = torch.randint(2, 90, (2, 5 + rank), generator=generator)
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        return {"input_ids": input_ids, "decoder_input_ids": input_ids.flip(1)}
    if type(model).__name__ == "Qwen3OmniMoeTalkerModel":  # what it embeds comes from elsewhere
        return {"inputs_embeds": model.get_input_embeddings()(input_ids)}
    return {"input_ids": input_ids}


def step(model: Any, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """What the model says, and the gradients that a loss of it gives."""
    out = model(**inputs_of(model, rank), use_cache=False)
    said = out.logits if hasattr(out, "logits") else out.last_hidden_state
    direction = torch.randn(said.shape, generator=torch.Generator().manual_seed(rank))
    model.zero_grad()
    (said * direction).sum().backward()
    grads = {
        name: torch.zeros_like(one) if one.grad is None else one.grad.clone()
        for name, one in model.named_parameters()
    }
    return said.detach(), grads


def classify(family: str, kind: Any = None) -> tuple[str, str]:
    """WORKS, REFUSED or BROKEN, and the words of the last two; raises if the results differ."""
    try:
        model = tiny_model(family, kind)
    except Exception as error:
        return BROKEN, words_of(error)
    try:
        find_experts(model)
    except ValueError as error:
        return REFUSED, words_of(error)
    try:
        alone = [step(model, rank) for rank in range(NUM_RANKS)]
    except Exception as error:
        return BROKEN, words_of(error)
    compare(model, alone)
    return WORKS, ""


def words_of(error: Exception) -> str:
    return " ".join(str(error).split())


def compare(model: nn.Module, alone: list[tuple[Tensor, dict[str, Tensor]]]) -> None:
    """Logits and gradients with tokens of ranks' own, and with the same."""
    copies: dict[Any, list[Any]] = {
        tokens: [copy.deepcopy(model) for _ in range(NUM_RANKS)] for tokens in ("own", "same")
    }

    def job(group: Any) -> dict[str, Any]:
        results = {}
        for tokens, models in copies.items():
            own = expert_parallel(models[group.rank()], group, tokens=tokens)
            results[tokens] = step(own, group.rank() if tokens == "own" else 0)
            own.tokenyard_buffer.close()
        return results

    ranks = run_virtual(job, NUM_RANKS).results
    for tokens in copies:
        same = tokens == "same"
        for rank in range(NUM_RANKS):
            want, _ = alone[0 if same else rank]
            near(ranks[rank][tokens][0], want, want.norm(), f"{tokens}: logits of rank {rank}")
        grads = [ranks[rank][tokens][1] for rank in range(NUM_RANKS)]
        experts = gradients_of_experts(copies[tokens], grads)
        assert any(one.norm() > 0 for one in experts.values()), "no expert has a gradient"
        largest = max(one.norm() for one in alone[0][1].values())
        for name, first in alone[0][1].items():
            want = first if same else torch.stack([one[name] for _, one in alone]).sum(0)
            if name in experts:
                got = [experts[name]]
            elif same:
                got = [one[name] for one in grads]
            else:
                got = [sum(one[name] for one in grads)]
            for one in got:
                near(one, want, largest, f"{tokens}: gradient of {name}")


def gradients_of_experts(
    models: list[nn.Module], grads: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Of all ranks' experts, by the names that they have in a checkpoint."""
    found = {}
    of_ranks = [list(shares(model)) for model in models]
    for name, holder, share in of_ranks[0]:
        holder.unused = torch.zeros_like(getattr(holder, "unused", torch.empty(0)))
        for key, _ in holder.named_parameters(recurse=False):
            if f"{name}.{key}" not in grads[0]:  # it is another module's too
                continue
            own = grads[0][f"{name}.{key}"]
            whole = own.new_empty(share.num_experts, *own.shape[1:])
            for held, given in zip(of_ranks, grads):
                ids = next(one.ids for where, _, one in held if where == name)
                whole[ids] = given[f"{name}.{key}"]
            saved = unstack(holder, key, whole)
            found.update({f"{name}.{one}": value for one, value in saved.items()})
    return found


def near(got: Tensor, want: Tensor, scale: Tensor, what: str) -> None:
    """Sums are made in another order, so float32's last bits differ, and layers make that more."""
    assert got.shape == want.shape, what
    error = float((got - want).norm())
    limit = float(1e-4 * want.norm() + 1e-6 * scale)
    assert error <= limit, f"{what}: {error:.2g} from one process, want {limit:.2g}"
