"""Where the experts of a Buffer live, and how they move: all ranks agree on a new placement, and
forget what the old one told them.

Only what the Buffer knows changes here. The holder of the weights moves them by the Moves that
come back, as `nn.rebalance` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tokenyard import validate
from tokenyard.engine.agreement import Call, Terms
from tokenyard.engine.engine import Engine
from tokenyard.engine.loops import Few
from tokenyard.engine.mismatch import STAGES
from tokenyard.engine.stacks import share_stack
from tokenyard.replicas import Moves, Replicas, as_replicas, num_logical, place_words, replicas_of
from tokenyard.shm.stack import Stack
from tokenyard.topology import Placement
from tokenyard.types import digest

_STAGE = "rebalance"


class Placed:
    """The calls of a Buffer about its experts: where they live, and their weights."""

    _use: Any  # a context of one call at a time
    _few: Few | None
    _low_latency: Any  # the low-latency engine, or None
    _open_engine: Callable[[], Engine]
    refuse: Callable[[Exception], None]
    rank: int

    def get_local_experts(self, num_experts: int) -> list[int]:
        """The global ids of this rank's experts, in the order of their local ids."""
        engine = self._open_engine()
        return list(engine.replicas(num_experts, "get_local_experts").experts_of_rank[engine.rank])

    def get_placement(self, num_experts: int) -> Replicas:
        """Where so many experts live now: those in each rank's slots. Local, as is
        get_local_experts. Two placements are the same if their `mark` is.
        """
        return self._open_engine().replicas(num_experts, "get_placement")

    @property
    def balance(self) -> float | None:
        """The slack of the balance between ranks of a node; None without one, also where they
        cannot share memory.
        """
        balance = self._open_engine().local.balance
        return None if balance is None else balance.slack

    def get_node_experts(self, num_experts: int) -> list[int]:
        """The global ids of the experts that this rank may have to compute, in the order of rows by
        expert: with a balance all of its node, by owner; else get_local_experts.
        """
        engine, owned = self._open_engine(), self.get_local_experts(num_experts)
        balance = engine.local.balance
        return owned if balance is None else balance.experts(engine.local.placement(num_experts))

    def require_placement(self, num_experts: int, mark: int) -> None:
        """For a caller whose weights lie in the placement with this mark: all ranks raise if
        experts live elsewhere by now. Local, if all is well; other ranks may be in a dispatch
        already, where they meet this one.
        """
        try:
            now = self.get_placement(num_experts).mark
        except ValueError:  # of another number of experts
            now = None
        if now != mark:
            self.refuse(
                ValueError(
                    "the Buffer was rebalanced, and the experts of this module still lie where "
                    "they were: want tokenyard.nn.rebalance(module, placement) with every module "
                    f"that uses the Buffer, copies of a model too, on rank {self.rank}"
                )
            )

    def rebalance(self, placement: Tensor | Replicas) -> Moves:
        """Change where experts live, on all ranks at once, and say which of them move.

        All ranks give the same placement, of as many experts as before, or all raise and nothing
        changes. Only the Buffer's knowledge changes: the holder of the weights moves them, as
        tokenyard.nn.rebalance does. Handles of earlier dispatches are refused afterwards; hooks of
        earlier low-latency dispatches still deliver. stats() counts the load of experts anew.
        """
        with self._use as engine:
            moves = _agree(engine, placement)
            if self._few is not None:
                self._few.forget()
            if self._low_latency is not None:
                self._low_latency.forget()
        return moves

    def share_stack(self, own: Tensor) -> Stack:
        """Put this rank's stack [L, ...] of experts, on CPU, where all ranks of its node read it,
        each at addresses of its own: `own` is its copy, which this rank may write to, and `node`
        [E, ...] is the stacks of all ranks of the node, by rank, to be read alone. Both are
        contiguous.

        L may differ between ranks; the rest of the shape and the dtype must be the same, or all
        ranks raise, as they do if one has no memory. Whoever writes to a page of other ranks' parts
        alone dies of it. What is there stays for as long as a tensor of it lives, also on other
        ranks: if the owner has died, its last values. Write between steps, when nobody reads.
        """
        self._use.stage = "share stack"
        with self._use as engine:
            return share_stack(engine, own)

    @property
    def replicas(self) -> Replicas | None:
        """The copies of experts, or None where each expert has one rank."""
        return replicas_of(self._open_engine().local.given_placement)

    def sum_replicas(self, counts: Tensor | Sequence[int]) -> Tensor:
        """[E]: counts by physical expert, as get_dispatch_layout gives them, by logical expert."""
        replicas = self.replicas
        validate.require(
            replicas is not None,
            f"the Buffer has no Replicas: counts are by expert already, on rank {self.rank}",
        )
        assert replicas is not None
        return replicas.sum(counts)


def _agree(engine: Engine, placement: Any) -> Moves:
    """From the next call on experts live where `placement` says. Handles made before are refused.

    Raises on all ranks, and changes nothing, if the placement is bad or ranks give different ones.
    """
    engine.worker.drain()
    try:
        placed = engine.checked_placement(placement)
        before = engine.local.given_placement
        if before is None:  # even: any number of experts, so as many as there will be
            before = Placement.even(num_logical(placed), engine.num_ranks)
        moves = as_replicas(before).moves(as_replicas(placed), engine.topology.node_of_rank)
        mark = digest(repr(place_words(placed)))
        terms = Terms(Call(stage=STAGES.index(_STAGE), options=mark))
    except Exception as error:
        engine.agreement.reject(_STAGE, error)
    engine.agreement.meet(_STAGE, terms)
    engine.place(placed, mark)
    return moves
