"""A program on the ranks, with all that the oracle gives too. Importable, so that processes can."""

from __future__ import annotations

import gc
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.nn.programs import data
from tests.nn.programs.layer import Adapter, open_buffers, placement
from tests.nn.programs.oracle import DECAY
from tests.nn.programs.program import Move, Program, Slots
from tests.nn.programs.training import Trainee, mesh_of, note_parameters
from tokenyard import PeerInputError
from tokenyard.nn import checkpoint_state, rebalance, sum_replica_gradients
from tokenyard.testing import poisoned

Record = dict[str, Tensor]
BEHIND = "the Buffer was rebalanced, and the experts of this module still lie where they were"
REFUSED = {
    "count": "placement",
    "differ": "ranks differ in the placement",
    "adapter": "is an adapter of this rank's experts",
    "ddp": r"want tokenyard\.nn\.prepare_for_ddp\(model\) before",
    "copies": "is an adapter of experts that have copies",
    "fsdp2": "was sharded by fully_shard, which mixes experts of different ranks",
}


def on_virtual_rank(group: Any, program: Program) -> Record:
    """What the oracle gives for this rank."""
    record: Record = {}
    _Phase(group, program, range(len(program.steps)), record).run("", "")
    return record


_groups: dict[int, Any] = {}  # of the first so many processes


def on_process(world: Any, program: Program, folder: str) -> Record:
    """What fails is told in the folder too: other ranks may wait for the one that failed."""
    try:
        return _in_phases(world, program, folder)
    except BaseException:
        Path(folder, f"rank-{world.rank()}").write_text(traceback.format_exc())
        raise


def _in_phases(world: Any, program: Program, folder: str) -> Record:
    """Some ranks may have nothing to do, before a checkpoint is loaded or after it."""
    if not _groups:
        sizes = range(1, world.size() + 1)
        _groups.update({size: dist.new_group(list(range(size))) for size in sizes})
    cut = len(program.steps) if program.restart is None else program.restart.step
    record: Record = {}
    failed: list[BaseException] = []
    with poisoned():
        for steps in (range(cut), range(cut, len(program.steps))):
            if not steps:
                continue
            size = program.steps[steps[0]].num_ranks
            if world.rank() < size:
                saved = str(Path(folder, "saved")) if program.restart else ""
                phase = _Phase(_groups[size], program, steps, record)
                try:
                    phase.run(saved if steps[0] else "", "" if steps[0] else saved)
                except Exception as error:
                    failed.append(error)
            dist.barrier(world)  # also where this rank failed, since others wait there
            if failed:
                raise failed[0]
    if program.compiled != "none":
        torch._dynamo.reset()
        gc.collect()
    return record


class _Phase:
    """The steps of a program that one set of ranks does."""

    def __init__(self, group: Any, program: Program, steps: range, record: Record) -> None:
        self.group, self.program, self.steps, self.record = group, program, steps, record

    def run(self, load: str, save: str) -> None:
        """With folders to load from first, and to save in at last."""
        program, restart = self.program, self.program.restart
        slots = tuple(layer.slots for layer in program.layers)
        placed = tuple(layer.placed for layer in program.layers)
        if load:
            assert restart is not None
            slots, placed = restart.slots, restart.placed
        with ExitStack() as stack:
            self._open(stack, slots, placed, load)
            self._slots = slots[0]
            for number in self.steps:
                self._step(number)
            if save:
                dcp.save(self._state(), checkpoint_id=save, process_group=self.group)
            elif self.steps[-1] + 1 == len(program.steps):
                for one in self._models:
                    note_parameters(one.stack, one.name, self.record)
                if self._ema is not None:
                    note_parameters(self._ema.module, "EMA, ", self.record)
                if program.last:
                    self._end()

    def _open(
        self, stack: ExitStack, slots: tuple[Slots, ...], placed: tuple[bool, ...], load: str
    ) -> None:
        program = self.program
        self._buffers = open_buffers(stack, self.group, program, slots, placed)
        self._models = [
            Trainee(self.group, self._buffers, program, number, to_load=bool(load))
            for number in range(program.num_models)
        ]
        self._ema: AveragedModel | None = None
        if program.ema:
            self._ema = AveragedModel(
                self._models[0].stack, multi_avg_fn=get_ema_multi_avg_fn(DECAY)
            ).eval()
        if load:
            dcp.load(self._state(), checkpoint_id=load, process_group=self.group)

    def _step(self, number: int) -> None:
        step = self.program.steps[number]
        if step.move is not None:
            self._move(number, step.move)
        if step.wide_rank >= 0:
            self._refuse_width(number)
        model = self._models[step.model]
        model.step(number, self._slots, self.record)
        if self._ema is not None:
            if step.model == 0 and step.learning_rate:
                self._ema.update_parameters(model.stack)
            x = data.tokens(self.program, number, 0, self.group.rank())
            with torch.no_grad():
                self.record[f"step {number}, EMA, out"] = self._ema(x)

    def _holders(self) -> list[Any]:
        """All that holds experts, the first model first."""
        return [one.stack for one in self._models] + ([self._ema.module] if self._ema else [])

    def _state(self) -> dict[str, Any]:
        extra = [self._ema] if self._ema is not None else []
        held = nn.ModuleList([*(one.stack for one in self._models), *extra])
        state = checkpoint_state(held)
        for model in self._models:
            for optimiser in model.optimisers:
                state |= checkpoint_state(held, optimiser)
        return state

    def _move(self, number: int, move: Move) -> None:
        program, holders = self.program, self._holders()
        first, *others = self._models
        theirs = [one for model in others for one in model.optimisers]
        both = [*first.optimisers, *theirs]
        for place, slots in enumerate(move.slots):
            count = max(expert for held in slots for expert in held) + 1
            then: Any = placement(slots, count)
            parts = [one.layers[place] for one in holders] if program.own_buffers else holders
            if move.refused:
                if move.refused == "differ" and self.group.rank():
                    then = placement(slots[::-1], count)
                with refused(REFUSED[move.refused]):
                    rebalance(nn.ModuleList(parts), then, *both)
                continue
            if move.how == "behind":
                rebalance(holders[0], then, *first.optimisers)
                for one in holders[1:]:
                    self._refuse_to_run(one, number)
                rebalance(nn.ModuleList(holders[1:]), then, *theirs)
                continue
            if move.how == "by hand":
                self._buffers[place].rebalance(then)
                self._refuse_to_run(holders[0], number)
            rebalance(nn.ModuleList(parts), then, *both)
        if not move.refused:
            self._slots = move.slots[0]

    def _refuse_to_run(self, module: nn.Module, number: int) -> None:
        with refused(BEHIND), torch.no_grad():
            module.eval()(data.tokens(self.program, number, 0, self.group.rank()))

    def _refuse_width(self, number: int) -> None:
        step, rank = self.program.steps[number], self.group.rank()
        x = data.tokens(self.program, number, 0, rank)
        if rank == step.wide_rank:
            x = torch.cat([x, x[..., :1]], -1)
        with refused(rf"want \[\.\.\., {self.program.hidden}\]"), torch.no_grad():
            self._holders()[0].eval()(x)  # choices of refused tokens count where it trains

    def _end(self) -> None:
        """A wrapper that takes experts for the same on all ranks, or an adapter of copies."""
        stack, last = self._models[0].stack, self.program.last
        number = len(self.program.steps) - 1
        if last == "adapter":
            moe: Any
            for moe in stack.layers:
                nothing = moe.experts.gate_up.new_zeros(len(moe.experts.ids), 1, 1)
                moe.experts = Adapter(moe.experts, nothing, nothing)
            with refused(REFUSED["copies"]):
                sum_replica_gradients(stack)
            return
        with refused(REFUSED[last]), torch.no_grad():
            if last == "ddp":
                nn.parallel.DistributedDataParallel(stack, process_group=self.group)
            else:
                from torch.distributed.fsdp import fully_shard

                fully_shard(stack, mesh=mesh_of(self.group))
                stack(data.tokens(self.program, number, 0, self.group.rank()))


def refused(words: str) -> Any:
    """What is done inside raises with these words, on every rank."""
    return pytest.raises((ValueError, RuntimeError, PeerInputError), match=words)
