"""Megatron's own MoELayer, with its experts on several processes, on a machine without a GPU.

pip install --no-deps megatron-core==0.16.1
export PYTHONPATH=$(python -m tokenyard.compat.deep_ep_path)  # `import deep_ep` is tokenyard
torchrun --nproc-per-node 4 examples/megatron_moe_on_cpu.py

For tests of expert parallelism in CI: routing, dispatch, experts and combine are Megatron's code,
untouched, forward and backward. docs/guide/from_deepep.md says why the first lines are needed.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
moe_utils.te_general_gemm = None

NUM_EXPERTS, NUM_TOPK, HIDDEN, LENGTH, BATCH, NUM_STEPS = 8, 2, 32, 16, 4, 30


def make_layer() -> torch.nn.Module:
    """Experts over all ranks; every other kind of parallelism is of one rank."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=NUM_TOPK,
        moe_router_dtype="fp32",
        moe_ffn_hidden_size=64,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="deepep",
        expert_model_parallel_size=dist.get_world_size(),
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    groups = dict.fromkeys(("ep", "tp_ep", "tp_dp_cp"), dist.group.WORLD)
    groups |= dict.fromkeys(("tp", "cp", "tp_cp", "expt_tp", "expt_dp"), alone)
    return build_module(
        get_moe_module_spec(use_te=False, num_experts=NUM_EXPERTS),
        config=config,
        layer_number=1,
        pg_collection=ProcessGroupCollection(**groups),
    )


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # one router on all ranks
    layer = make_layer()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    for step in range(NUM_STEPS):
        y, _ = layer(x)
        loss = (y - x.roll(1, -1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in layer.named_parameters():
            if not name.startswith("experts."):  # those have the gradients of all ranks' tokens
                dist.all_reduce(parameter.grad)
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item() / dist.get_world_size():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
