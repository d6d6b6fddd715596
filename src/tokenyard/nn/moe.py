"""A Mixture-of-Experts layer whose experts live on all ranks of a Buffer.

    with tokenyard.Buffer(group) as buffer:
        layer = MoE(buffer, hidden=512, intermediate=1024, router=RouterConfig(...))
        y = layer(x)  # [..., hidden] of this rank's tokens

Every rank holds its own experts only. All ranks must call the layer equally often; a call may have
any number of tokens, also none. Ranks that seed torch alike begin with the same layer, on any
number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tokenyard.buffer import Buffer
from tokenyard.nn import functional, stacks
from tokenyard.nn.router import Router, RouterConfig, auxiliary_loss, count
from tokenyard.nn.share import Share, watch_gradients


class Experts(nn.Module):
    """This rank's experts, one stacked tensor a matrix: down(silu(gate(x)) * up(x))."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: list[int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ids = experts  # global, in the order of the stack
        self.tokenyard: Share | None = None  # of the layer that it belongs to
        num_local, kind = len(experts), dict[str, Any](device=device, dtype=dtype)
        # The columns of gate, then those of up: one product instead of two.
        self.gate_up = nn.Parameter(torch.empty(num_local, hidden, 2 * intermediate, **kind))
        self.down = nn.Parameter(torch.empty(num_local, intermediate, hidden, **kind))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw one seed from torch's generator, and each expert's weights from that seed plus its
        id. So neither an expert, nor what torch draws afterwards, depends on which experts live
        here.
        """
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(2**48))
        if self.down.is_meta:  # there is nothing to fill
            return
        for local, expert in enumerate(self.ids):
            generator = torch.Generator().manual_seed(seed + expert)
            for stack in (self.gate_up, self.down):
                bound = stack.shape[1] ** -0.5
                drawn = torch.empty(stack.shape[1:], dtype=torch.float32, device="cpu")
                drawn.uniform_(-bound, bound, generator=generator)
                stack[local].copy_(drawn)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [M, D] by expert; expert l's rows end before offsets[l]. In the dtype of x."""
        gate, up = self._times("gate_up", x, offsets).chunk(2, 1)
        return self._times("down", nn.functional.silu(gate) * up, offsets)

    def _times(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        share = self.tokenyard
        weights: Tensor = getattr(self, name)
        if share is not None:
            weights = share.weights(self, name, offsets.shape[0])
        return functional.grouped_mm(x, weights.to(x.dtype), offsets)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save as torch does, and the experts' ids as metadata: a stack does not tell them."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["experts"] = list(self.ids)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *more: Any
    ) -> None:
        """Load as torch does, but refuse a stack whose metadata names other experts."""
        saved = local_metadata.get("experts", self.ids)
        if saved != self.ids:
            *_, errors = more
            errors.append(
                f"{prefix[:-1]} holds experts {saved}, want {self.ids}: the placement was another, "
                "see tokenyard.nn.checkpoint_state"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)

    def extra_repr(self) -> str:
        """What print(module) says of it."""
        num_local, intermediate, hidden = self.down.shape
        return f"{num_local} local, hidden={hidden}, intermediate={intermediate}"


class SharedExpert(nn.Module):
    """An expert for all tokens, on every rank."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False, device=device, dtype=dtype)
        self.down = nn.Linear(intermediate, hidden, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


class MoE(nn.Module):
    """A layer whose experts live on all ranks of a Buffer: router, dispatch_by_expert, experts,
    combine_by_expert.

        buffer            where rows travel; its placement says which experts live here
        intermediate      the inner width of an expert
        shared            the inner width of an expert for all tokens; 0 for none
        share_experts     whether ranks of a node can read each other's experts (`share_experts`):
                          None: if the Buffer has a balance, which needs it
        num_worst_tokens  0, or the exact number of rows that dispatch returns, at least the tokens
                          of all ranks together: no size then depends on values

    `auxiliary_loss` has the last forward pass's loss of the router, if its config has one.
    """

    def __init__(
        self,
        buffer: Buffer,
        hidden: int,
        intermediate: int,
        router: RouterConfig,
        *,
        shared: int = 0,
        num_worst_tokens: int = 0,
        share_experts: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.buffer = buffer
        self.num_experts = router.num_experts
        self.num_worst_tokens = num_worst_tokens
        replicas = buffer.get_placement(router.num_experts)
        self._share = Share(buffer=buffer, replicas=replicas, num_losses=buffer.group_size)
        self.router = Router(hidden, router, device=device, dtype=dtype)
        self.experts = Experts(hidden, intermediate, self._share.ids, device=device, dtype=dtype)
        self.experts.tokenyard = self._share
        watch_gradients(self)
        if stacks.wants_stacks(buffer, share_experts) and not self.experts.down.is_meta:
            stacks.share_experts(self)
        self.shared = SharedExpert(hidden, shared, device=device, dtype=dtype) if shared else None
        # Of the last call, if that was in training, and the router has one.
        self.auxiliary_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]. All ranks of the Buffer call it together, each with its own x."""
        hidden = self.router.weight.shape[1]
        if x.shape[-1:] != (hidden,):
            wrong = f"x is {list(x.shape)}, want [..., {hidden}], on rank {self.buffer.rank}"
            self.buffer.refuse(ValueError(wrong))
        tokens = x.reshape(-1, hidden)
        chosen = self.router(tokens)
        routed = functional.autocast(tokens), chosen.topk_idx, chosen.topk_weights
        out: Tensor | None
        if self.num_worst_tokens:
            out = self._with_fixed_sizes(*routed)
        else:
            # Those of functional.through_experts, whose own frame would cost torch.compile a graph.
            given, place = (self.buffer, *routed, self.num_experts), self._share.place
            balanced = self._share.may_borrow(self.experts)
            more: dict[str, Any] = {"place": place, "balanced": balanced}
            out = functional.few_through_experts(*given, self.experts, **more)
            if out is None:
                rows = functional.dispatch_by_expert(*given, **more)
                y = self.experts(rows.x, rows.offsets)
                out = functional.combine_by_expert(self.buffer, y, rows)
        if self.shared is not None:
            out = out + self.shared(tokens)
        self._balance(chosen.scores, chosen.topk_idx)
        return out if x.dim() == 2 else out.reshape(x.shape)

    def _with_fixed_sizes(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """The forward pass with num_worst_tokens: no size depends on values."""
        shared = self._share.stacks
        may = self._share.may_borrow(self.experts) and not torch.is_grad_enabled()
        balanced = shared.num_balanced if may and shared is not None else 0
        rows = functional.dispatch(
            self.buffer,
            x,
            topk_idx,
            topk_weights,
            self.num_experts,
            num_worst_tokens=self.num_worst_tokens,
            place=self._share.place,
            balanced=balanced > 0,
        )
        num_local = balanced or len(self.experts.ids)
        # The most rows that permute can make of those that arrive: a token's experts are distinct.
        most = self.num_worst_tokens * min(self.router.config.num_topk, num_local)
        grouped = functional.permute(rows.x, rows.topk_idx, num_local, num_rows=most)
        y = self.experts(grouped.x, grouped.offsets)
        y = functional.unpermute(y, grouped.row_of, rows.topk_weights)
        return functional.combine(self.buffer, y, rows)

    def _balance(self, scores: Tensor, topk_idx: Tensor) -> None:
        coefficient = self.router.config.auxiliary_loss
        self.auxiliary_loss = None
        if not coefficient or not self.training:
            return
        load = self._over_ranks(count(topk_idx, self.num_experts))
        self.auxiliary_loss = coefficient * auxiliary_loss(scores, load)

    def has_lost_gradient(self) -> bool:
        """Whether the last call made an auxiliary loss without a graph, though it needs one."""
        loss = self.auxiliary_loss
        return loss is not None and not loss.requires_grad and self.router.weight.requires_grad

    def update_bias(self) -> None:
        """Move the router's bias by what all ranks chose since the last time. All ranks call it,
        once a step.
        """
        if self.router.load is not None:
            self.router.move_bias(self._over_ranks(self.router.load))

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets: all but the loss of a call, which belongs to that call's graph."""
        return {**self.__dict__, "auxiliary_loss": None}

    def _over_ranks(self, load: Tensor) -> Tensor:
        return functional.sum_over_ranks(self.buffer, load)
