"""Experts that follow a placement: their weights and their optimiser's states, moved by a Buffer.

What moves is cut into rows of bytes, and every rank dispatches the rows of its experts to the ranks
that will have them, in pieces of at most 32 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenyard.buffer import Buffer
from tokenyard.nn.optimiser_state import states_by_expert
from tokenyard.nn.share import (
    Share,
    is_dtensor,
    own_parameters,
    refuse_adapters,
    shares,
    was_sharded,
)
from tokenyard.replicas import Moves, Replicas
from tokenyard.types import digest
from tokenyard.validate import require

PIECE = 32 << 20  # bytes that a rank sends, or gets, at once
_ROW = 16 << 10  # bytes of a row, at most


@torch.no_grad()
def rebalance(module: nn.Module, placement: Tensor | Replicas, *optimizers: Optimizer) -> Moves:
    """`Buffer.rebalance`, and the experts move with it: those of all layers in the module, which
    must share one Buffer, with what the optimisers keep for them. Says which experts moved.

    All ranks call it between an optimiser's step and the next forward pass. Parameters stay the
    objects that they were; their gradients are dropped. Give all optimisers of the experts.

    Raises on all ranks, and changes nothing, if an optimiser keeps something that belongs to no
    single expert, or if ranks differ in the placement or in what there is to move.
    """
    held = [(part, share) for _, part, share in shares(module)]
    require(len(held) > 0, "the module holds no experts of a Buffer, want one that has an nn.MoE")
    buffer = held[0][1].buffer
    try:
        stacks = _check(module, held, optimizers)
    except ValueError as error:
        buffer.refuse(error)
        raise
    mark = torch.tensor([digest(repr([stack.told() for stack in stacks]))], device="cpu")
    marks = buffer.all_gather(mark).x
    if not bool((marks == marks[0]).all()):
        raise ValueError(
            "ranks differ in the experts' parameters, or in what optimisers keep for them, want "
            f"the same module and as many steps on all ranks, on rank {buffer.rank}"
        )
    moves = buffer.rebalance(placement)
    for stack in stacks:
        stack.put(move_stack(buffer, moves, stack.get()))
    for part, share in held:
        share.follow(part, moves.after)
    return moves


class _Stack:
    """A tensor with one part for each expert of this rank: a parameter, or a state of one."""

    def __init__(self, parameter: nn.Parameter, optimizer: Optimizer | None, key: str) -> None:
        self._parameter, self._optimizer, self._key = parameter, optimizer, key

    def is_of(self, parameter: nn.Parameter) -> bool:
        return self._parameter is parameter

    def get(self) -> Tensor:
        if self._optimizer is None:
            return self._parameter.data
        return self._optimizer.state[self._parameter][self._key]

    def put(self, moved: Tensor) -> None:
        if self._optimizer is not None:
            self._optimizer.state[self._parameter][self._key] = moved
            return
        parameter = self._parameter
        parameter.grad = None
        # Where a graph of before is alive, so is its node for this parameter's gradient, which
        # expects the shape of before. Data of another dtype makes torch forget the node.
        other = torch.float32 if moved.dtype == torch.float64 else torch.float64
        parameter.data = torch.empty(0, dtype=other, device=moved.device)
        parameter.data = moved

    def told(self) -> tuple[object, ...]:
        """What must be the same on all ranks."""
        stack = self.get()
        return self._key, list(stack.shape[1:]), str(stack.dtype)


def _check(
    module: nn.Module, held: list[tuple[nn.Module, Share]], optimizers: tuple[Optimizer, ...]
) -> list[_Stack]:
    """What will move. Raises ValueError if something cannot."""
    refuse_adapters(module)
    buffer = held[0][1].buffer
    stacks: list[_Stack] = []
    require(
        all(share.buffer is buffer for _, share in held),
        "the module's layers have several Buffers, want those of one Buffer at a time",
    )
    names = {parameter: name for name, parameter in module.named_parameters()}
    for _, share in held:
        share.check_move()
    for part, _ in held:
        for parameter in own_parameters(part):
            if any(stack.is_of(parameter) for stack in stacks):
                continue  # layers may share one
            name = names.get(parameter, "")
            if is_dtensor(parameter):
                raise ValueError(was_sharded(name or type(part).__name__))
            stacks.append(_Stack(parameter, None, name))
            for optimizer in optimizers:
                for key in states_by_expert(optimizer, parameter, name):
                    stacks.append(_Stack(parameter, optimizer, key))
    return stacks


def move_stack(buffer: Buffer, moves: Moves, stack: Tensor) -> Tensor:
    """What a rank's [L, ...] becomes when its experts have moved. All ranks call it together."""
    rank = buffer.rank
    sources = moves.sources[rank]
    moved = stack.new_empty(len(sources), *stack.shape[1:])
    for local, source in enumerate(sources):
        if source.rank == rank:
            moved[local].copy_(stack[source.local])
    num_bytes = math.prod(stack.shape[1:]) * stack.element_size()
    if not moves.between_ranks or not num_bytes:
        return moved
    trips = _Trips(moves, buffer.group_size)
    num_rows = -(-num_bytes // _ROW)
    width = -(-num_bytes // num_rows)
    old_LB, new_LB = _as_bytes(stack), _as_bytes(moved)
    sent, came = trips.sent[rank], trips.received(rank)
    for begin, end in pieces(num_rows, width * trips.most):
        here = slice(begin * width, min(end * width, num_bytes))
        rows = torch.zeros(len(sent), (end - begin) * width, dtype=torch.uint8, device="cpu")
        if sent:
            rows[:, : here.stop - here.start] = old_LB[list(sent), here]
        to_ranks = trips.to_ranks(rank).repeat_interleave(end - begin, 0)
        got = send(buffer, rows.view(-1, width), to_ranks, moves.after.num_slots)
        for number, targets in enumerate(came):
            block = got[number * (end - begin) : (number + 1) * (end - begin)].reshape(-1)
            for local in targets:
                new_LB[local, here] = block[: here.stop - here.start].to(new_LB.device)
    return moved


class _Trips:
    """Who sends which slots to whom, as all ranks know it."""

    def __init__(self, moves: Moves, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # By rank: the slots that it sends, ascending; for each the ranks that get it, and where to.
        self.sent: list[dict[int, dict[int, list[int]]]] = [{} for _ in range(num_ranks)]
        for _, source, target in sorted(moves.between_ranks, key=lambda move: move.source):
            to = self.sent[source.rank].setdefault(source.local, {})
            to.setdefault(target.rank, []).append(target.local)
        counts = [len(sent) for sent in self.sent]
        counts += [len(self.received(rank)) for rank in range(num_ranks)]
        self.most = max(counts)  # slots that a rank sends, or gets

    def received(self, rank: int) -> list[list[int]]:
        """For each slot that comes, by source rank and slot: the slots that it goes to."""
        return [to[rank] for sent in self.sent for to in sent.values() if rank in to]

    def to_ranks(self, rank: int) -> Tensor:
        """[slots sent, R] bool."""
        found = torch.zeros(len(self.sent[rank]), self._num_ranks, dtype=torch.bool, device="cpu")
        for row, to in enumerate(self.sent[rank].values()):
            found[row, list(to)] = True
        return found


def pieces(num_rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of at most PIECE bytes, or of one row."""
    step = max(1, PIECE // max(1, row_bytes))
    for begin in range(0, num_rows, step):
        yield begin, min(begin + step, num_rows)


def send(buffer: Buffer, rows_TW: Tensor, to_ranks_TR: Tensor, num_slots: int) -> Tensor:
    """Rows that go to these ranks, whatever experts are there: what arrives, by (rank, row)."""
    got = buffer.dispatch(
        rows_TW,
        num_tokens_per_rank=to_ranks_TR.sum(0, dtype=torch.int32),
        is_token_in_rank=to_ranks_TR,
        num_tokens_per_expert=torch.zeros(num_slots, dtype=torch.int32, device="cpu"),
    )
    assert isinstance(got.recv_x, Tensor)
    return got.recv_x


def _as_bytes(stack: Tensor) -> Tensor:
    """[L, bytes of an expert]."""
    width = math.prod(stack.shape[1:]) * stack.element_size()
    return stack.detach().contiguous().view(-1).view(torch.uint8).view(stack.shape[0], width)
