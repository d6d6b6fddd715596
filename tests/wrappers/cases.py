"""Every wrapper that is tested, which is the table of docs/training.md.

python -m tests.wrappers.cases  # prints the table
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    wrapper: str
    how: str  # what a user writes
    within: float = 1e-5  # of one process: every loss, every parameter after the last step
    because: str = ""  # why that is more than 1e-5
    outcome: str = ""  # where it is refused: in which words


# With nn.MoE, on 2 ranks: tests/wrappers/test_layer.py
LAYER = {
    "ddp": Case(
        wrapper="DistributedDataParallel",
        how="`prepare_for_ddp(model)` before it",
    ),
    "ddp_unused": Case(
        wrapper="DistributedDataParallel, `find_unused_parameters`",
        how="as above",
    ),
    "ddp_no_sync": Case(
        wrapper="DistributedDataParallel, `no_sync` for accumulation",
        how="as above",
    ),
    "fsdp": Case(
        wrapper="FSDP2",
        how="`fully_shard(model, ignored_params=expert_parameters(model))`, "
        "then `average_expert_gradients(model)`",
    ),
    "fsdp_layers": Case(
        wrapper="FSDP2, each layer and the root",
        how="as above, with `ignored_params` for each call",
    ),
    "fsdp_bfloat16": Case(
        wrapper="FSDP2, `MixedPrecisionPolicy(bfloat16)`",
        how="as above; experts stay in float32 and compute in bfloat16",
        within=1e-2,
        because="bfloat16 keeps 8 bits, and sums over ranks are made in another order",
    ),
    "fsdp_offload": Case(
        wrapper="FSDP2, `CPUOffloadPolicy`",
        how="as above; `pin_memory=False` where there is no GPU",
    ),
}

REFUSED = {
    "fsdp_all": Case(
        wrapper="FSDP2 without `ignored_params`",
        how="",
        outcome="want fully_shard(model, ignored_params=expert_parameters(model))",
    ),
}
