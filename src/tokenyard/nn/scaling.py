"""Loss scaling in float16 where each rank holds other experts.

Experts overflow on the rank that has them. torch.amp.GradScaler would let that rank alone skip its
step and lower its scale, and ranks would drift apart.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenyard.nn.clipping import own_change
from tokenyard.nn.functional import gather_over_ranks
from tokenyard.nn.share import is_dtensor, shares
from tokenyard.validate import require


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for a module with experts on all ranks: if gradients of one rank
    overflow, all ranks skip the step and lower the scale. The options are torch's.

    All ranks call unscale_, step and update together.
    """

    def __init__(self, module: nn.Module, device: str = "cpu", **options: Any) -> None:
        super().__init__(device, **options)
        self._module = module
        self._buffers = list(dict.fromkeys(share.buffer for _, _, share in shares(module)))
        require(len(self._buffers) > 0, "the module holds no experts of a Buffer, want some")

    def _unscale_grads_(self, optimizer: Optimizer, *more: Any) -> dict[torch.device, Tensor]:
        """What torch finds on this rank, and then the most that any rank has found. torch takes
        DTensors, as those of FSDP2, by themselves only.
        """
        given = [one for group in optimizer.param_groups for one in group["params"]]
        most = torch.zeros(1, device="cpu")
        for sharded in (False, True):
            some = [one for one in given if is_dtensor(one.grad) == sharded]
            alike: Any = SimpleNamespace(param_groups=[{"params": some}])
            with own_change(self._module):
                found = super()._unscale_grads_(alike, *more)
            for one in found.values():
                most = torch.maximum(most, one.to("cpu"))
        for buffer in self._buffers:
            most = gather_over_ranks(buffer, most).amax(0)
        return {most.device: most[0]}
