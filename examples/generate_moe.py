"""A transformers MoE model that generates with its experts over ranks.

torchrun --nproc-per-node 4 examples/generate_moe.py

Weights are random, so what it says makes no sense; that it says the same as one process with all
experts is the point. With a checkpoint, `from_pretrained` of the same module reads on each rank the
experts that it keeps, and no others.
"""

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tokenyard.integrations.transformers import expert_parallel

NUM_NEW = 24


def make_model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)  # the same on every rank
    config = Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        initializer_range=0.1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config).eval()


def num_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    prompt = torch.tensor([[11, 222, 333, 44]])

    def say(model: Qwen3MoeForCausalLM) -> list[int]:
        out = model.generate(prompt, max_new_tokens=NUM_NEW, do_sample=False)
        return out[0, prompt.shape[1] :].tolist()

    model = make_model()
    want, whole = say(model), num_bytes(model)
    model = expert_parallel(model, dist.group.WORLD, tokens="same")
    got = say(model)
    print(f"rank {rank}: {num_bytes(model) / 1e6:.1f} of {whole / 1e6:.1f} MB", flush=True)
    dist.barrier()
    if rank == 0:
        print(f"tokens: {got}", flush=True)
        print(f"the same as one process with all experts: {got == want}", flush=True)
    assert got == want
    model.tokenyard_buffer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
