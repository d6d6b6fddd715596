"""Exchanges to compare the vLLM plugin's with: every token goes to every rank, and sums come back.

vLLM's own all-to-all manager gathers tokens and reduces the result where it is implemented, and so
does what is proposed for CPUs (vLLM's pull request 47778). An entry point of vLLM's puts one of
these in the place of the plugin's Exchange; what else surrounds the experts kernel stays the same.

    shm     vLLM's C++ collectives in shared memory, which its tensor parallel ranks use
    gloo    torch.distributed

Each rank's tokens are padded to the rank with most. vLLM's ranks know these numbers at every step.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.integrations.vllm.exchange import Arrived, Exchange
from tokenyard.ops.permute import permute, unpermute


class GatheringExchange(Exchange):
    """Subclasses gather [T, ...] of all ranks, and add up [R * T, D] of all ranks in place."""

    _locals: Tensor | None = None  # [E + 1], the local id of each expert; -1, also for padding

    def send(
        self,
        x: Any,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        balanced: bool = False,
    ) -> Arrived:
        if self._locals is None:
            self._locals = torch.tensor([*self.expert_map(num_experts), -1])
        num_tokens = x.shape[0]
        most = self.most_tokens(num_tokens)
        if most > num_tokens:
            rows = 0, 0, 0, most - num_tokens
            x = torch.nn.functional.pad(x, rows)
            topk_ids = torch.nn.functional.pad(topk_ids, rows, value=num_experts)
            topk_weights = torch.nn.functional.pad(topk_weights, rows)
        all_x, ids, weights = self.gather_all(x, topk_ids, topk_weights)
        num_local = self.experts(num_experts).num_local
        grouped = permute(all_x, self._locals[ids], num_local)
        begin = most * self.buffer.rank

        def combine(y: Tensor, weigh: bool = True, out: Tensor | None = None) -> Tensor:
            sums = unpermute(y, grouped.row_of, weights=weights if weigh else None)
            self.add_up(sums)
            mine = sums[begin : begin + num_tokens]  # this rank's tokens among those of all
            return mine if out is None else out.copy_(mine)

        return Arrived(grouped.x, grouped.scales, grouped.offsets, combine)

    def gather_all(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Ids and weights are one message, of a dtype that vLLM's collectives move.
        routing = torch.cat([ids.int().view(torch.float32), weights.float()], 1)
        all_x, all_routing = self.all_gather(x), self.all_gather(routing)
        all_ids, all_weights = all_routing.chunk(2, 1)
        return all_x, all_ids.view(torch.int32), all_weights.contiguous()

    def warm_up(self, dtype: torch.dtype) -> None:
        """Nothing: a request warms these up."""

    def most_tokens(self, mine: int) -> int:
        """Of any rank, in this step of vLLM's."""
        from vllm.forward_context import get_forward_context

        told = get_forward_context().dp_metadata
        return mine if told is None else int(told.num_tokens_across_dp_cpu.max())

    def all_gather(self, one: Tensor) -> Tensor:
        raise NotImplementedError

    def add_up(self, sums: Tensor) -> None:
        raise NotImplementedError


class ShmExchange(GatheringExchange):
    _manager: int | None = None

    def all_gather(self, one: Tensor) -> Tensor:
        out = one.new_empty(self.buffer.group_size * one.shape[0], *one.shape[1:])
        torch.ops._C.shm_all_gather(self._shm(), one, out)
        return out

    def add_up(self, sums: Tensor) -> None:
        torch.ops._C.shm_allreduce(self._shm(), sums)

    def _shm(self) -> int:
        """vLLM's handle of its shared memory, opened by all ranks at the first use."""
        if self._manager is None:
            group, size, rank = self.buffer.group, self.buffer.group_size, self.buffer.rank
            names = [f"benchmark-{uuid.uuid4().hex}" if rank == 0 else None]
            dist.broadcast_object_list(names, group=group, group_src=0)
            threads = torch.get_num_threads()
            self._manager = torch.ops._C.init_shm_manager(names[0], size, rank, threads)
            dist.barrier(group)
            torch.ops._C.join_shm_manager(self._manager, names[0])
            dist.barrier(group)
            # All have mapped it, and vLLM would leave it there.
            Path(f"/dev/shm/{names[0]}_{rank}").unlink(missing_ok=True)
        return self._manager


class GlooExchange(GatheringExchange):
    def all_gather(self, one: Tensor) -> Tensor:
        size = self.buffer.group_size
        out = one.new_empty(size * one.shape[0], *one.shape[1:])
        dist.all_gather(list(out.chunk(size)), one.contiguous(), group=self.buffer.group)
        return out

    def add_up(self, sums: Tensor) -> None:
        """A reduce-scatter: gloo need not bring sums to ranks that do not want them."""
        mine = sums.chunk(self.buffer.group_size)[self.buffer.rank]
        summed = torch.empty_like(mine)
        dist.reduce_scatter_tensor(summed, sums, group=self.buffer.group)
        mine.copy_(summed)


def shm() -> None:
    """An entry point of vLLM's."""
    _replace(ShmExchange)


def gloo() -> None:
    """An entry point of vLLM's."""
    _replace(GlooExchange)


def _replace(exchange: type[Exchange]) -> None:
    import tokenyard.integrations.vllm.manager as manager

    manager.Exchange = exchange  # type: ignore[misc]
