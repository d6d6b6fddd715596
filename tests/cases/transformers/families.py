"""Every family of transformers that has MoE layers, found by reading the library; tiny models."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of transformers' own imports
    import transformers.models
    from transformers import PreTrainedModel

from tokenyard.integrations.transformers.adapters import ADAPTERS, REFUSED

MODELS = Path(transformers.models.__file__).parent
# A family has MoE layers if its code counts experts and has a class of that name.
COUNTS = re.compile(r"num_(local_)?experts|n_routed_experts|use_experts_implementation")
CLASS = re.compile(r"^class \w*(Expert|MoE|Moe|Router)\w*\(", re.MULTILINE)
REGISTERED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)
HEADS = ("ForCausalLM", "ForConditionalGeneration", "ForTokenClassification", "Model", "Backbone")

# Sizes by the names that configs give them; only those that a config has are set.
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "d_model": 32,
    "intermediate_size": 24,
    "ffn_dim": 24,
    "d_ff": 24,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # so that the experts have a say in the logits
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "depth": 1,
    "out_hidden_size": 32,
    "projection_intermediate_size": 16,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "Qwen3OmniMoeTalkerModel": {"shared_expert_intermediate_size": 24},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "dbrx": {
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": 4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_top_k": 2},
    },
    "diffusion_gemma": {"text_config": {"top_k_experts": 2}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "doge": {"is_moe": True},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [24, 24],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            },
        }
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8,
    },
    "glm4v_moe": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 0],
            }
        }
    },
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse"]}},
    "granitemoehybrid": {"mamba_n_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 3, "expert_ffn_hidden_size": 24},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "mistral4": {"head_dim": 16},
    "muse_spark": {
        "audio_config": {
            "num_hidden_layers": 4,
            "out_hidden_size": 32,
            "hidden_sizes": [8, 8, 8, 8],
        },
        "projector_hidden_size": 16,
        "out_hidden_size": 32,
    },
    "nllb_moe": {"pad_token_id": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "step3p7": {
        "text_config": {
            "pad_token_id": 1,
            "sliding_window": 8,
            "mlp_layer_types": ["dense", "sparse"],
            "swiglu_limits": [0.0, 0.5],
        }
    },
    "switch_transformers": {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
    "vitpose_backbone": {"part_features": 8},
    "zaya": {"num_experts_per_tok": 1},
}
# Where a family's model is not the first that ends in one of HEADS, or has more experts classes.
CLASSES: dict[str, tuple[str, ...]] = {
    "diffusion_gemma": ("DiffusionGemmaForBlockDiffusion",),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeTalkerModel"),
    "vitpose_backbone": ("VitPoseBackbone",),
}


def walk() -> dict[str, list[str]]:
    """The names of the folders, each with its classes of experts."""
    found: dict[str, set[str]] = {}
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        text = file.read_text()
        if COUNTS.search(text) and CLASS.search(text):
            ours = [name for name in (*ADAPTERS, *REFUSED) if f"class {name}(" in text]
            found.setdefault(file.parent.name, set()).update([*REGISTERED.findall(text), *ours])
    return {family: sorted(names) for family, names in found.items()}


def classes_of(family: str) -> list[Any]:
    """Models that have all classes of experts: with a head, of language alone if there is one."""
    names = {}
    for file in sorted((MODELS / family).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{family}.{file.stem}")
        names.update(
            {
                name: one
                for name, one in inspect.getmembers(module, inspect.isclass)
                if issubclass(one, PreTrainedModel) and one.__module__ == module.__name__
            }
        )
    if family in CLASSES:
        return [names[name] for name in CLASSES[family]]
    for head in HEADS:
        ending = [name for name in names if name.endswith(head)]
        if ending:
            return [names[min(ending, key=len)]]
    raise ValueError(f"{family} has no model among {sorted(names)}")


def tiny_config(config_class: Any, more: dict[str, Any]) -> Any:
    """more: values by name, for parts of the config in a dict of their own."""
    plain = config_class()
    sizes = {name: value for name, value in SMALL.items() if _has(plain, name)}
    sizes.update({name: value for name, value in more.items() if name not in plain.sub_configs})
    for name, part in plain.sub_configs.items():
        known = getattr(plain, name, None)
        kind, given = type(known) if known is not None else part, more.get(name, {})
        if getattr(kind, "model_type", ""):
            sizes[name] = tiny_config(kind, given).to_dict()
        elif given:
            sizes[name] = given
    return config_class(**sizes)


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except RuntimeError:  # it may differ from layer to layer
        return True


def tiny_model(family: str, kind: Any = None, **more: Any) -> Any:
    """Of one of the family's classes, the first if none is given; more: values of the config, and
    of its part about text.
    """
    kind = kind or classes_of(family)[0]
    known = OVERRIDES.get(kind.__name__, OVERRIDES.get(family, {}))
    sizes = {**known, **more, "text_config": {**known.get("text_config", {}), **more}}
    if "text_config" not in kind.config_class.sub_configs:
        del sizes["text_config"]
    torch.manual_seed(5)
    model = kind(tiny_config(kind.config_class, sizes)).float().eval()
    for parameter in model.parameters():  # some classes leave matrices as they were in memory
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model
