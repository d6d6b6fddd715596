"""Small MoE models with random weights, saved as a user's checkpoint would be.

python vllm_models.py qwen3 DIRECTORY
"""

from __future__ import annotations

import sys
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


def save(kind: str, directory: Path, **changes: Any) -> Path:
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
    model.save_pretrained(directory)
    return directory


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
