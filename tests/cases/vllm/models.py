"""Small MoE models with random weights, saved as a user's checkpoint would be.

python vllm_models.py qwen3 DIRECTORY
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    # DeepSeek's way: sigmoid scores with a bias, groups of experts, a shared expert, a first layer
    # without experts. But with plain attention: one process of vLLM 0.32 does not repeat itself
    # with DeepSeek's own (CPU_MLA, float32), so there is nothing to compare with.
    "glm4": (
        "Glm4Moe",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 128,
        },
    ),
}
KINDS = tuple(_KINDS)


def save(
    kind: str, directory: Path, alter: Callable[[Any], object] | None = None, **changes: Any
) -> Path:
    """config.json and model.safetensors, the same for everyone who asks for the same."""
    name, own = _KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**(_SMALL | own | changes))
    torch.manual_seed(20)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for key, one in (*model.named_parameters(), *model.named_buffers()):
            if one.ndim > 1:
                # Large enough that the next token depends on what the experts say.
                one.normal_(std=1.5 / one.shape[-1] ** 0.5)
            elif key.endswith("bias"):
                one.normal_(std=0.1)
    if alter is not None:
        alter(model)
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def skew(model: Any, exponent: float, scattered: bool) -> list[float]:
    """Let the routers of a Qwen3-MoE choose experts by Zipf's law with this exponent: the first are
    hot, or, scattered, others in each layer. Returns for each layer the busiest of two ranks' pairs
    over the mean.

    Channel 0 of hidden states is made a constant, which routers weigh by the logarithm of each
    expert's odds. What they see of the other channels varies as Gumbel's noise would, with which
    the k largest are drawn by these odds.
    """
    model.model.embed_tokens.weight[:, 0] = 1
    busiest = []

    def calibrate(router: Any, given: tuple[torch.Tensor]) -> None:
        x, weight = given[0].reshape(-1, router.hidden_dim).float(), router.weight.float()
        weight[:, 1:] *= math.pi / 6**0.5 / (x[:, 1:] @ weight[:, 1:].T).std(0)[:, None]
        place = (torch.randperm(len(weight)) if scattered else torch.arange(len(weight))) + 1
        usual = (x[:, 1:] @ weight[:, 1:].T).mean(0)
        weight[:, 0] = -(usual + exponent * place.log()) / x[:, 0].mean()
        router.weight.copy_(weight)
        chosen = (x @ weight.T).topk(router.top_k).indices
        first = (chosen < len(weight) / 2).float().mean().item()
        busiest.append(2 * max(first, 1 - first))

    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.experts.down_proj[:, 0] = 0
        layer.mlp.gate.register_forward_pre_hook(calibrate)
    torch.manual_seed(21)
    model(torch.randint(1, 500, (1, 256)))
    return busiest


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
