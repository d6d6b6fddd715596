"""Faults of what learns: gradients, copies of experts, checkpoints, the layer and its router."""

from __future__ import annotations

from tools.faults.fault import Fault

_OPTIMISER = "nn/optimiser_state.py"

FAULTS = (
    Fault(
        "replicas-far-copies-are-taken-too",
        "replicas",
        "engine/choice.py",
        "slots += near or copies",
        "slots += copies",
        first="tests/transports/test_replicas.py",
    ),
    Fault(
        "replicas-second-copy-is-not-summed",
        "replicas",
        "nn/replica_gradients.py",
        "for local in locals_[1:]:",
        "for local in locals_[2:]:",
        first="tests/nn/test_rebalance.py",
    ),
    Fault(
        "replicas-old-handles-stay-good",
        "replicas",
        "engine/core.py",
        '        self.origin = self.origin._replace(place=digest(f"{self.origin.place} {mark}"))\n',
        "",
        first="tests/engine/test_rebalance.py",
    ),
    Fault(
        "gradients-of-expert-0-are-lost",
        "gradients",
        "nn/operators/exchange.py",
        "grad_weights = grad_weights.masked_fill(topk_idx < 0, 0.0)",
        "grad_weights = grad_weights.masked_fill(topk_idx <= 0, 0.0)",
        first="tests/nn/test_gradients.py",
    ),
    Fault(
        "gradients-are-not-averaged",
        "gradients",
        "nn/share.py",
        "return grad / ctx.number, None",
        "return grad, None",
        first="tests/nn/test_training.py",
    ),
    Fault(
        "gradients-norm-counts-every-copy",
        "gradients",
        "nn/clipping.py",
        "one.grad if places is None else one.grad[places]\n",
        "one.grad\n",
        first="tests/nn/test_clipping.py",
    ),
    Fault(
        "gradients-dot-adds-halves-crosswise",
        "order",
        "kernels/numba/permute_backward.py",
        "sums[lane] += sums[half + lane]",
        "sums[lane] += sums[2 * half - 1 - lane]",
        first="tests/kernels/test_permute_backward.py",
    ),
    Fault(
        "checkpoint-leaves-out-buffers",
        "checkpoints",
        "nn/checkpoint.py",
        "module.state_dict(keep_vars=True).items()",
        "module.named_parameters()",
        first="tests/nn/test_checkpoint.py",
    ),
    Fault(
        "checkpoint-leaves-out-options",
        "checkpoints",
        _OPTIMISER,
        '"options": _options(self._group),',
        '"options": {},',
        first="tests/nn/test_checkpoint.py",
    ),
    Fault(
        "checkpoint-loses-the-step",
        "checkpoints",
        _OPTIMISER,
        "            self._room[key].copy_(one)\n",
        "",
        first="tests/nn/test_checkpoint.py",
    ),
    Fault(
        "router-masks-groups-by-zero",
        "layer",
        "nn/router.py",
        "scores = groups.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)",
        "scores = groups.masked_fill(~kept[:, :, None], 0.0).flatten(1)",
        first="tests/nn/test_router.py",
    ),
    Fault(
        "planner-counts-one-node-of-relays",
        "planner",
        "planner/traffic.py",
        "node_in=num_nodes * (ranks_here - 1) * to_rank,",
        "node_in=(ranks_here - 1) * to_rank,",
    ),
)
