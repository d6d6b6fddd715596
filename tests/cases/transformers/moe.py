"""What a rank does in the tests of the integration with transformers; importable by processes."""

from __future__ import annotations

import copy
import os
import resource
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of transformers' own imports
    from transformers import (
        AutoModelForCausalLM,
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )
    from transformers.utils.logging import disable_progress_bar

from tests.cases.clock import scaled
from tests.cases.nn.few import ordinary, watched
from tokenyard import PeerInputError, PeerLeft, Replicas
from tokenyard.integrations.transformers import (
    expert_parallel,
    experts,
    from_pretrained,
    save_pretrained,
)
from tokenyard.integrations.transformers.saving import gather_state
from tokenyard.nn import (
    named_expert_parameters,
    prepare_for_ddp,
    rebalance,
    sum_replica_gradients,
)
from tokenyard.nn.share import shares

disable_progress_bar()

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 3,
    "initializer_range": 0.2,  # so that the experts have a say in the logits
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}
MODELS: dict[str, Any] = {
    "mixtral": lambda **more: MixtralForCausalLM(
        MixtralConfig(**{**SHAPE, "num_local_experts": 8, "intermediate_size": 48, **more})
    ),
    "qwen3_moe": lambda **more: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **{**SHAPE, "num_experts": 8, "moe_intermediate_size": 48, "head_dim": 16, **more}
        )
    ),
    "deepseek_v3": lambda **more: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{
                **SHAPE,
                "num_key_value_heads": 4,
                "n_routed_experts": 8,
                "moe_intermediate_size": 48,
                "intermediate_size": 80,
                "first_k_dense_replace": 1,
                "n_group": 2,
                "topk_group": 1,
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
                **more,
            }
        )
    ),
}


def whole_model(kind: str, **more: Any) -> Any:
    """The same on every rank."""
    torch.manual_seed(5)
    return MODELS[kind](**more).eval()


def tokens_of(rank: int) -> Tensor:
    """Ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, SHAPE["vocab_size"], (2, 5 + rank), generator=generator)


def gradients(model: nn.Module, input_ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits, and what a loss of them gives every parameter."""
    out = model(input_ids, labels=input_ids)
    model.zero_grad()
    out.loss.backward()
    return out.logits.detach(), grads_of(model)


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    """An expert that nobody chose has no gradient on one process, and zeros on many."""
    return {
        name: torch.zeros_like(one) if one.grad is None else one.grad
        for name, one in model.named_parameters()
    }


def train(group: Any, kind: str, tokens: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model = expert_parallel(whole_model(kind), group, tokens=tokens)
    return gradients(model, tokens_of(group.rank() if tokens == "own" else 0))


def train_while_experts_move(
    group: Any, placements: list[Any]
) -> tuple[list[Tensor], dict[str, Tensor] | None]:
    """Steps of Adam, with a placement for each, or none: the logits, and on rank 0 the end."""
    first, *others = placements
    model = expert_parallel(whole_model("mixtral"), group, placement=first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for placement in [None, *others]:
        if placement is not None:
            rebalance(model, placement, optimizer)
        seen.append(gradients(model, tokens_of(group.rank()))[0])
        sum_replica_gradients(model)
        optimizer.step()
    return seen, gather_state(model)


def refuse_to_move(group: Any) -> None:
    copies = Replicas([[0, 1, 2, 3, 4], [4, 5, 6, 7]])
    with pytest.raises(ValueError, match='want the rank of each expert with tokens="same"'):
        expert_parallel(whole_model("mixtral"), group, tokens="same", placement=copies)
    model = expert_parallel(whole_model("mixtral"), group, tokens="same")
    with pytest.raises((ValueError, PeerInputError), match='the model has tokens="same"'):
        rebalance(model, copies)


def penalised(model: Any, input_ids: Tensor) -> dict[str, Tensor]:
    """What the norm of a gradient, the embeddings', gives every parameter."""
    embedded = model.get_input_embeddings()(input_ids).detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # the others have no gradients of gradients
        loss = model(inputs_embeds=embedded).logits.square().mean()
        (grad,) = torch.autograd.grad(loss, embedded, create_graph=True)
        model.zero_grad()
        grad.square().sum().backward()
    return grads_of(model)


def train_twice(group: Any, kind: str, tokens: Any) -> dict[str, Tensor]:
    model = expert_parallel(whole_model(kind), group, tokens=tokens)
    return penalised(model, tokens_of(group.rank() if tokens == "own" else 0))


def generate(group: Any, kind: str, tokens: Any, num_tokens: int) -> Tensor:
    model = expert_parallel(whole_model(kind), group, tokens=tokens)
    return continued(model, group.rank() if tokens == "own" else 0, num_tokens)


def continued(model: Any, rank: int, num_tokens: int) -> Tensor:
    return model.generate(tokens_of(rank), max_new_tokens=num_tokens, do_sample=False)


def generate_and_keep(group: Any, kind: str, how: str) -> tuple[Any, ...]:
    """What generation says, and all that is kept of it: the hidden states of all layers and steps,
    and what the experts were given. How many calls went by an exchange that was prepared, or, if
    `how` is "ordinary", that all calls were others; "half" is so for the later of two ranks.
    """
    model = expert_parallel(whole_model(kind), group)
    buffer, seen = model.tokenyard_buffer, []
    through = experts.through_experts

    def keeping(module: Any, x: Tensor, offsets: Tensor) -> Tensor:
        seen.append((x, offsets))
        return through(module, x, offsets)

    is_ordinary = how == "ordinary" or (how == "half" and group.rank() == 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "through_experts", keeping)
        with ordinary(buffer) if is_ordinary else watched(buffer) as taken:
            got = model.generate(
                tokens_of(group.rank()),
                max_new_tokens=12,
                do_sample=False,
                output_hidden_states=True,
                return_dict_in_generate=True,
            )
    return len(taken or ()), got.sequences, got.hidden_states, seen


def save(group: Any, kind: str, path: str, uneven: bool) -> str:
    """What the model's own way says, after ours has saved it."""
    placement = torch.tensor([1, 0, 0, 0, 1, 0, 0, 0]) if uneven else None
    model = expert_parallel(whole_model(kind), group, placement=placement)
    save_pretrained(model, path)
    try:
        model.save_pretrained(path)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def save_and_load(group: Any, kind: str, path: str) -> tuple[Tensor, Tensor]:
    """Logits before, and of what is loaded at once from the folder."""
    model = expert_parallel(whole_model(kind), group)
    save_pretrained(model, path)
    loaded = from_pretrained(AutoModelForCausalLM, path, group)
    input_ids = tokens_of(group.rank())
    return model(input_ids).logits.detach(), loaded(input_ids).logits.detach()


def save_twice(group: Any, kind: str, path: str) -> list[str]:
    """The first time in several files; what is in the folder then, and after the second time."""
    model = expert_parallel(whole_model(kind), group)
    seen = []
    for size in ("100KB", "5GB"):
        save_pretrained(model, path, max_shard_size=size)
        seen.append(" ".join(sorted(os.listdir(path))))
    return seen


def save_where_a_file_is(group: Any, kind: str, path: str) -> str:
    model = expert_parallel(whole_model(kind), group)
    try:
        save_pretrained(model, path)
    except (OSError, ValueError) as error:
        model(tokens_of(group.rank()))  # it still works
        return f"{type(error).__name__}: {error}"
    return "nothing"


def load_what_one_has(group: Any, path: str) -> str:
    there = path if group.rank() == 0 else f"{path}-gone"
    try:
        from_pretrained(AutoModelForCausalLM, there, group)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def load_few_experts(group: Any, path: str, tokens: Any) -> tuple[list[int], Tensor]:
    """The experts of this rank, and the logits."""
    model = from_pretrained(AutoModelForCausalLM, path, group, tokens=tokens)
    ids = next(share.ids for _, _, share in shares(model))
    return ids, model(tokens_of(0)).logits.detach()


def load(group: Any, path: str, auto: bool, tokens: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """As train, from a checkpoint."""
    kinds = {"mixtral": MixtralForCausalLM, "qwen3_moe": Qwen3MoeForCausalLM}
    kinds["deepseek_v3"] = DeepseekV3ForCausalLM
    model_class = AutoModelForCausalLM if auto else kinds[path.rpartition("/")[2]]
    model = from_pretrained(model_class, path, group, tokens=tokens)
    assert type(model).__name__.endswith("ForCausalLM")
    assert type(model) in kinds.values()
    return gradients(model, tokens_of(group.rank() if tokens == "own" else 0))


def loading_info(group: Any, path: str) -> tuple[bool, dict[str, Any]]:
    """Whether the model of the pair is spread, and what transformers says of its loading."""
    model, info = from_pretrained(MixtralForCausalLM, path, group, output_loading_info=True)
    return hasattr(model, "tokenyard_buffer"), info


def bytes_to_load(group: Any, path: str, alone: bool) -> tuple[int, int]:
    """How much the process grew at most, and the bytes of the model's parameters."""
    warm = torch.randn(64, 64) @ torch.randn(64, 64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if alone:
        model = AutoModelForCausalLM.from_pretrained(path)
    else:
        model = from_pretrained(AutoModelForCausalLM, path, group)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return grown * 1024, sum(one.nbytes for one in model.parameters()) + 0 * int(warm.sum())


def generate_unequally(group: Any, kind: str) -> Tensor:
    """Ranks that want different numbers of tokens."""
    model = expert_parallel(whole_model(kind), group)
    more = 3 + 4 * group.rank()
    return model.generate(
        tokens_of(group.rank()), max_new_tokens=more, do_sample=False, synced_gpus=True
    )


def generate_and_leave(group: Any, kind: str) -> str:
    """As above, but nobody takes care that ranks make as many forward passes as each other."""
    model = expert_parallel(whole_model(kind), group, timeout=scaled(60))
    try:
        model.generate(tokens_of(0), max_new_tokens=3 + 4 * group.rank(), do_sample=False)
    except PeerLeft as error:
        return str(error)
    finally:
        model.tokenyard_buffer.close()
    return "nothing"


def no_tokens_on_one_rank(group: Any, kind: str, shape: tuple[int, int]) -> str:
    """What each rank is told, when it is not the end of the Buffer."""
    model = expert_parallel(whole_model(kind), group, timeout=scaled(60))
    input_ids = torch.zeros(shape, dtype=torch.int64) if group.rank() else tokens_of(0)
    try:
        model(input_ids, labels=input_ids)
    except (RuntimeError, ValueError) as error:
        model(input_ids=tokens_of(group.rank()))  # the Buffer still works
        return f"{type(error).__name__}: {error}"
    return "nothing"


def ddp_after_prepare(group: Any, kind: str) -> tuple[bool, Tensor, dict[str, Tensor]]:
    """Are the experts this rank's still; and as train."""
    model = expert_parallel(whole_model(kind), group)
    own = {name: one.detach().clone() for name, one in named_expert_parameters(model)}
    prepare_for_ddp(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    kept = all(torch.equal(one, own[name]) for name, one in named_expert_parameters(model))
    logits, grads = gradients(wrapped, tokens_of(group.rank()))
    return kept, logits, {name.removeprefix("module."): one for name, one in grads.items()}


def copied(group: Any, kind: str, tokens: Any) -> tuple[Tensor, Tensor]:
    """Logits of a copy, and of the copy when the model itself has changed."""
    model = expert_parallel(whole_model(kind), group, tokens=tokens)
    input_ids = tokens_of(group.rank() if tokens == "own" else 0)
    twin = copy.deepcopy(model)
    first = twin(input_ids).logits.detach()
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(2)
    return first, twin(input_ids).logits.detach()


def ddp_that_nobody_prepared(group: Any, kind: str) -> tuple[Tensor, str]:
    """What it says without gradients, which needs no preparation, and when it is trained."""
    model = expert_parallel(whole_model(kind), group)
    wrapped, input_ids = nn.parallel.DistributedDataParallel(model), tokens_of(group.rank())
    with torch.no_grad():
        logits = wrapped(input_ids).logits
    try:
        wrapped(input_ids)
    except RuntimeError as error:
        return logits, str(error)
    return logits, "nothing"
