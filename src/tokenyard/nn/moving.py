"""Experts that follow a placement: their weights and their optimiser's states, moved by a Buffer.

What moves is cut into rows of bytes, and every rank dispatches the rows of its experts to the ranks
that will have them, in pieces of at most 32 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenyard.buffer import Buffer
from tokenyard.engine.failure import raised_on_all_ranks
from tokenyard.errors import TokenyardError
from tokenyard.nn.optimiser_state import states_by_expert
from tokenyard.nn.share import (
    Share,
    is_dtensor,
    own_parameters,
    refuse_adapters,
    shares,
    was_sharded,
)
from tokenyard.replicas import Moves, Replicas, Slot, as_replicas
from tokenyard.results import Dispatched
from tokenyard.runtime import interrupts
from tokenyard.types import digest
from tokenyard.validate import require

PIECE = 32 << 20  # bytes that a rank sends, or gets, at once
_ROW = 16 << 10  # bytes of a row, at most
_LIES = "tokenyard_replicas"  # a parameter's attribute: where its experts lie, once they have moved


@torch.inference_mode(False)  # what is made in that mode cannot be trained
@torch.no_grad()
def rebalance(module: nn.Module, placement: Tensor | Replicas, *optimizers: Optimizer) -> Moves:
    """`Buffer.rebalance`, and the experts move with it: those of all layers in the module, which
    must share one Buffer, with what the optimisers keep for them. Says which of the first layer's
    moved.

    All ranks call it between an optimiser's step and the next forward pass. Parameters stay the
    objects that they were; their gradients are dropped. Give all optimisers of the experts, and
    everything that holds experts of the Buffer, as `nn.ModuleList([model, ema])`. What is left out
    raises when it is called, until `rebalance` gets it too, with the same placement.

    Raises on all ranks, and changes nothing, if something cannot move, if there is no memory for
    the new experts beside the old, or if ranks differ in the placement or in what there is to move.
    """
    held = [(part, share) for _, part, share in shares(module)]
    require(len(held) > 0, "the module holds no experts of a Buffer, want one that has an nn.MoE")
    buffer = held[0][1].buffer
    try:
        after = as_replicas(buffer._open_engine().checked_placement(placement))
        stacks = _check(module, held, after, optimizers)
    except Exception as error:
        buffer.refuse(error)
        raise
    told = digest(repr([stack.told() for stack in stacks])), after.mark
    marks = buffer.all_gather(torch.tensor([told], device="cpu")).x
    same_stacks, same_placement = (marks == marks[0]).all(0).tolist()
    require(
        same_stacks,
        "ranks differ in the experts' parameters, in where they lie, or in what optimisers keep "
        f"for them, want the same module and as many steps on all ranks, on rank {buffer.rank}",
    )
    require(same_placement, f"ranks differ in the placement, want the same, on rank {buffer.rank}")
    try:
        moved = [stack.move(buffer) for stack in stacks]
    except Exception as error:
        if not (isinstance(error, TokenyardError) or raised_on_all_ranks(error)):
            buffer.refuse(error)  # of this rank alone: the others wait for its rows
        raise
    buffer.rebalance(placement)  # which all ranks come to, or none
    with interrupts.deferred():
        for stack, tensor in zip(stacks, moved):
            stack.put(tensor)
        for part, share in held:
            share.follow(part, after)
    return stacks[0].moves


@dataclass(frozen=True)
class _Stack:
    """A tensor with one part for each expert of this rank: a parameter, or a state of one."""

    parameter: nn.Parameter
    moves: Moves
    name: str
    optimizer: Optimizer | None = None
    common: object = None  # what the optimiser keeps for all experts of the parameter

    def get(self) -> Tensor:
        if self.optimizer is None:
            return self.parameter.data
        return self.optimizer.state[self.parameter][self.name]

    def move(self, buffer: Buffer) -> Tensor:
        """What it becomes; of a tensor of inference mode another such."""
        stack = self.get()
        with torch.inference_mode(stack.is_inference()):
            return move_stack(buffer, self.moves, stack)

    def put(self, moved: Tensor) -> None:
        parameter = self.parameter
        if self.optimizer is not None:
            self.optimizer.state[parameter][self.name] = moved
            return
        parameter.grad = None
        # Where a graph of before is alive, so is its node for this parameter's gradient, which
        # expects the shape of before. Data of another dtype makes torch forget the node.
        other = torch.float32 if moved.dtype == torch.float64 else torch.float64
        parameter.data = torch.empty(0, dtype=other, device=moved.device)
        parameter.data = moved
        setattr(parameter, _LIES, self.moves.after)

    def told(self) -> tuple[object, ...]:
        """What must be the same on all ranks."""
        stack = self.get()
        kind = list(stack.shape[1:]), str(stack.dtype)
        return self.name, self.moves.before.mark, kind, self.common


def _check(
    module: nn.Module,
    held: list[tuple[nn.Module, Share]],
    after: Replicas,
    optimizers: tuple[Optimizer, ...],
) -> list[_Stack]:
    """What will move. Raises ValueError if something cannot.

    An expert is taken from where its layer knows it to be, since the Buffer may have been
    rebalanced with another module; or from where its parameter has moved to with another layer.
    """
    refuse_adapters(module)
    buffer = held[0][1].buffer
    require(
        all(share.buffer is buffer for _, share in held),
        "the module's layers have several Buffers, want those of one Buffer at a time",
    )
    nodes = buffer.stats()["nodes"]
    names = {parameter: name for name, parameter in module.named_parameters()}
    stacks: dict[nn.Parameter, list[_Stack]] = {}
    moves_from: dict[int, Moves] = {}  # layers mostly lie alike
    for part, share in held:
        share.check_move()
        for parameter in own_parameters(part):
            name = names.get(parameter, type(part).__name__)
            lies = getattr(parameter, _LIES, share.replicas)
            if parameter in stacks:  # layers may share one
                require(
                    stacks[parameter][0].moves.before == lies,
                    f"{name} belongs to layers of which one was rebalanced without the other, want "
                    "them together, always",
                )
                continue
            if lies.mark not in moves_from:
                moves_from[lies.mark] = lies.moves(after, nodes)
            moves = moves_from[lies.mark]
            if is_dtensor(parameter):
                raise ValueError(was_sharded(name))
            require(
                len(parameter) == len(here := lies.experts_of_rank[buffer.rank]),
                f"{name} has {len(parameter)} experts, want {len(here)}, those of this rank",
            )
            mine = stacks[parameter] = [_Stack(parameter, moves, name)]
            for optimizer in optimizers:
                keys, common = states_by_expert(optimizer, parameter, name)
                mine += [_Stack(parameter, moves, key, optimizer, common) for key in keys]
    return [one for some in stacks.values() for one in some]


def move_stack(buffer: Buffer, moves: Moves, stack: Tensor) -> Tensor:
    """What a rank's [L, ...] becomes when its experts have moved. All ranks call it together."""
    rank = buffer.rank
    sources = moves.sources[rank]
    if sources == tuple(Slot(rank, local) for local in range(len(stack))):
        moved = stack  # nothing comes, and all that is here stays
    else:
        moved = stack.new_empty(len(sources), *stack.shape[1:])
        for local, source in enumerate(sources):
            if source.rank == rank:
                moved[local].copy_(stack[source.local])
    num_bytes = math.prod(stack.shape[1:]) * stack.element_size()
    if not moves.between_ranks or not num_bytes:
        return moved
    trips = _Trips(moves, buffer.group_size)
    old_LB, new_LB = _as_bytes(stack), _as_bytes(moved)
    sent, came = trips.sent[rank], trips.received(rank)
    for count, width, here in pieces(num_bytes, _ROW, trips.most):
        rows = torch.zeros(len(sent), count * width, dtype=torch.uint8, device="cpu")
        if sent:
            rows[:, : here.stop - here.start] = old_LB[list(sent), here]
        to_ranks = trips.to_ranks(rank).repeat_interleave(count, 0)
        got = send(buffer, rows.view(-1, width), to_ranks, moves.after.num_experts).recv_x
        assert isinstance(got, Tensor)
        for block, targets in zip(got.reshape(-1, count * width), came):
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


def pieces(length: int, widest: int, each: int) -> Iterator[tuple[int, int, slice]]:
    """Pieces of an expert of this length: how many rows, their width, and where they lie in it. A
    row has at most `widest` elements, of `each` bytes on a rank, and a piece PIECE bytes, or a row.
    """
    num_rows = -(-length // widest)
    width = -(-length // num_rows)
    step = max(1, PIECE // (width * each))
    for begin in range(0, num_rows, step):
        count = min(step, num_rows - begin)
        yield count, width, slice(begin * width, min((begin + count) * width, length))


def send(buffer: Buffer, rows_TW: Tensor, to_ranks_TR: Tensor, num_experts: int) -> Dispatched:
    """Rows that go to these ranks, whatever experts are there: what arrives, by (rank, row)."""
    num_slots = buffer.get_placement(num_experts).num_slots
    return buffer.dispatch(
        rows_TW,
        num_tokens_per_rank=to_ranks_TR.sum(0, dtype=torch.int32),
        is_token_in_rank=to_ranks_TR,
        num_tokens_per_expert=torch.zeros(num_slots, dtype=torch.int32, device="cpu"),
    )


def _as_bytes(stack: Tensor) -> Tensor:
    """[L, bytes of an expert]."""
    width = math.prod(stack.shape[1:]) * stack.element_size()
    return stack.detach().contiguous().view(-1).view(torch.uint8).view(stack.shape[0], width)
