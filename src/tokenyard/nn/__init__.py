"""Expert parallelism in models: differentiable functions, and a layer made of them.

functional  dispatch, combine, permute, unpermute and grouped_mm, which gradients pass through
MoE         a layer whose experts live on all ranks of a Buffer
router      how tokens choose, and how the load of experts is kept even
parallel    experts beside DistributedDataParallel and FSDP
clipping    clip_grad_norm_ with the experts of all ranks
scaling     GradScaler, which skips a step on all ranks together
moving      experts that follow a placement, with their optimiser's states
stacks      experts where the ranks of a node read each other's, for a Buffer with a balance
replica_gradients  experts with copies: their gradients are summed
checkpoint  what to save, by names that do not depend on the number of ranks
"""

from tokenyard.nn import functional
from tokenyard.nn.checkpoint import checkpoint_state
from tokenyard.nn.clipping import accept_gradients, clip_grad_norm_, get_grad_norm
from tokenyard.nn.moe import Experts, MoE, SharedExpert
from tokenyard.nn.moving import rebalance
from tokenyard.nn.parallel import (
    auxiliary_losses,
    average_expert_gradients,
    expert_parameters,
    prepare_for_ddp,
    update_biases,
)
from tokenyard.nn.replica_gradients import sum_replica_gradients
from tokenyard.nn.router import Router, RouterConfig
from tokenyard.nn.scaling import GradScaler
from tokenyard.nn.share import Share, named_expert_parameters
from tokenyard.nn.stacks import share_experts

__all__ = [
    "Experts",
    "GradScaler",
    "MoE",
    "Router",
    "RouterConfig",
    "Share",
    "SharedExpert",
    "accept_gradients",
    "auxiliary_losses",
    "average_expert_gradients",
    "checkpoint_state",
    "clip_grad_norm_",
    "expert_parameters",
    "functional",
    "get_grad_norm",
    "named_expert_parameters",
    "prepare_for_ddp",
    "rebalance",
    "share_experts",
    "sum_replica_gradients",
    "update_biases",
]
