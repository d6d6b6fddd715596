"""What a rank does with a family's tiny model; importable by processes."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.distributed import DistributedConfig

from tests.cases.transformers.distributed import whole_of
from tests.cases.transformers.families import classes_of, tiny_model
from tests.cases.transformers.family_checks import BROKEN, WORKS, near, step, words_of
from tokenyard.integrations.transformers import expert_parallel, from_pretrained, save_pretrained

NO_PLAN = "no plan"
LAYOUTS: dict[str, dict[str, int]] = {
    WORKS: {"fsdp_size": 2, "ep_size": 2},
    f"{WORKS} with tp_size alone": {"tp_size": 2, "ep_size": 2},
}


def save_and_load(group: Any, family: str, path: str) -> Tensor | str:
    """What the model says that was saved and loaded again, or why it cannot be loaded."""
    model = expert_parallel(tiny_model(family), group)
    save_pretrained(model, path)
    dist.barrier(group)
    try:
        loaded = from_pretrained(classes_of(family)[0], path, group, tokens="same")
    except ValueError as error:
        return str(error)
    return step(loaded.eval(), 0)[0]


def by_one_word(group: Any, family: str, which: int, path: str) -> str:
    """What becomes of a family's class with `ep_implementation="tokenyard"`. What fails must fail
    with transformers' own "all_to_all" too.
    """
    kind, theirs = classes_of(family)[which], ""
    whole = tiny_model(family, kind)
    if group.rank() == 0:
        whole.save_pretrained(path, save_original_format=True)
    dist.barrier(group)
    try:
        alone = [step(whole, rank) for rank in range(2)]
    except TypeError:  # a model of images; what has no plan needs no comparison
        alone = []
    for word, sizes in LAYOUTS.items():
        ours = _why_not(group, kind, path, sizes, "tokenyard", alone)
        if not ours:
            return word
        if "has no `ep_plan`" in ours:
            return NO_PLAN
        theirs = _why_not(group, kind, path, sizes, "all_to_all", alone)
        assert theirs, f"all_to_all works, and tokenyard does not: {ours}"
    return f"{BROKEN}: {theirs}"


def _why_not(
    group: Any, kind: Any, path: str, sizes: dict[str, int], way: str, alone: list[Any]
) -> str:
    try:
        _compare(group, kind, path, sizes, way, alone)
    except Exception as error:
        return words_of(error)
    finally:
        gc.collect()
    return ""


def _compare(
    group: Any, kind: Any, path: str, sizes: dict[str, int], way: str, alone: list[Any]
) -> None:
    config = DistributedConfig(ep_implementation=way, **sizes)
    model = kind.from_pretrained(path, distributed_config=config).eval()
    same = "tp_size" in sizes
    rank = 0 if same else group.rank()
    said, grads = step(model, rank)
    near(whole_of(said), alone[rank][0], alone[rank][0].norm(), "logits")
    largest = max(one.norm() for one in alone[0][1].values())
    for name, one in grads.items():
        wants = [alone[0][1][name]] if same else [grads[name] for _, grads in alone]
        near(whole_of(one), torch.stack(wants).mean(0), largest, f"gradient of {name}")
