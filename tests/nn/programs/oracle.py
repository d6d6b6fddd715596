"""What a program must give, by plain loops on one process, with autograd for the gradients and
torch's own optimisers, clipping and averages of parameters. Experts have one tensor each there, and
no rank of their own; each rank is told of those that live with it.

Nothing here comes from tokenyard.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.nn.programs import data, optimisers
from tests.nn.programs.oracle_layer import NearTie, State
from tests.nn.programs.program import BY_HAND, Program, Step, num_tokens

__all__ = ["NearTie", "Record", "expect"]

Record = dict[str, Tensor]  # what there is to compare, by name

SCALE, GROWTH_INTERVAL = 1024.0, 2  # of the GradScaler
DECAY = 0.9  # of the average that a copy keeps


class _Model:
    """Layers, their optimisers, and the scale of their losses."""

    def __init__(self, program: Program, number: int) -> None:
        self.name = f"model {number}, " if number else ""
        self.program = program
        self.states = [State(program, place, number) for place in range(len(program.layers))]
        self.optimisers = optimisers.make(
            program.optimiser,
            [one for state in self.states for one in state.dense[0].values()],
            [one for state in self.states for part in state.experts for one in part.values()],
            program.split,
        )
        self.restart()

    def restart(self) -> None:
        """Nobody has saved the scale, or how often experts were chosen."""
        self.scale, self._good = SCALE, 0
        for state in self.states:
            state.forget_load()

    def sum_gradients(self) -> None:
        for state in self.states:
            state.sum_gradients(self.program.average)

    def learn(self, step: Step, overflow: str | None) -> dict[str, float]:
        """A step with gradients that are summed already. Returns numbers to compare."""
        program, told = self.program, dict[str, float]()
        if program.optimiser == BY_HAND:
            rate = step.learning_rate / program.hidden
            with torch.no_grad():
                for one in self._parameters():
                    if one.grad is not None:
                        one -= rate * one.grad.clamp(-1, 1)
            return told
        if not self.optimisers:
            return told
        if program.clip is not None:
            most, order = program.clip
            norm = float(nn.utils.clip_grad_norm_(self._once(), most, order))
            if overflow is not None:
                norm = float("inf")
                for one in self._once():
                    one.grad = None if one.grad is None else torch.zeros_like(one)
            told["norm"] = norm
        optimisers.set_rate(self.optimisers, step.learning_rate)
        own = {one for state in self.states for part in state.experts for one in part.values()}
        for optimiser in self.optimisers:
            parts = {
                "experts" if one in own else "dense"
                for group in optimiser.param_groups
                for one in group["params"]
            }
            if overflow not in parts:
                optimiser.step()
        for state in self.states:
            state.dense_equal()
        if program.scaler:
            self._good = 0 if overflow else self._good + 1
            if overflow:
                self.scale /= 2
            elif self._good == GROWTH_INTERVAL:
                self.scale, self._good = self.scale * 2, 0
            told["scale"] = self.scale
        return told

    def _parameters(self) -> list[Tensor]:
        return [one for state in self.states for one in state.leaves()]

    def _once(self) -> list[Tensor]:
        """Without what other ranks have too."""
        found: list[Tensor] = []
        for state in self.states:
            for part in (state.dense[0], *state.experts):
                found += part.values()
        return found

    def forget_gradients(self) -> None:
        for leaf in self._parameters():
            leaf.grad = None


class _Average:
    """A copy of the first model that follows it, as torch.optim.swa_utils.AveragedModel does."""

    def __init__(self, model: _Model) -> None:
        self.model, self.states = model, copy.deepcopy(model.states)
        self._updates = 0

    def update(self) -> None:
        keep = DECAY if self._updates else 0.0
        self._updates += 1
        with torch.no_grad():
            for mine, theirs in zip(self.states, self.model.states):
                for old, new in zip(mine.leaves(), theirs.leaves()):
                    old.copy_(keep * old + (1 - keep) * new)
                mine.bias = list(theirs.bias)


def expect(program: Program) -> list[Record]:
    """Of each rank."""
    models = [_Model(program, number) for number in range(program.num_models)]
    average = _Average(models[0]) if program.ema else None
    held = [model.states for model in models] + ([average.states] if average else [])
    records: list[Record] = [{} for _ in range(program.num_processes)]
    for number, step in enumerate(program.steps):
        if program.restart is not None and number == program.restart.step:
            for states in held:
                for state, slots in zip(states, program.restart.slots):
                    state.move(slots)
            for model in models:
                model.restart()
        if step.move is not None and not step.move.refused:
            for states in held:
                for place, state in enumerate(states):
                    state.move(step.move.slots[place if program.own_buffers else 0])
        model = models[step.model]
        _step(program, model, number, records)
        if average is not None:
            if step.model == 0 and step.learning_rate:
                average.update()
            with torch.no_grad():
                xs = _inputs(program, number, 0)
                for rank, out in enumerate(_outputs(program, average.states, xs)):
                    records[rank][f"step {number}, EMA, out"] = out
    last = records[: program.steps[-1].num_ranks]
    for model in models:
        for place, state in enumerate(model.states):
            _note_parameters(state, f"{model.name}layer {place}", "at the end", last)
    for place, state in enumerate(average.states if average else []):
        _note_parameters(state, f"EMA, layer {place}", "at the end", last)
    return records


def _step(program: Program, model: _Model, number: int, records: list[Record]) -> None:
    step = program.steps[number]
    here = records[: step.num_ranks]
    model.forget_gradients()
    for call in range(len(step.shapes)):
        _call(program, model.states, number, call, here)
    overflow = None
    if step.mode == "backward":
        overflow = program.overflows(step, model.states[0].slots)
        if program.synced:
            model.sum_gradients()
        if overflow is None:
            for place, state in enumerate(model.states):
                at = f"step {number}, layer {place}"
                _note_parameters(state, at, "grad", here, program.average and not program.synced)
        if not program.synced:
            model.sum_gradients()
    if step.learning_rate:
        for name, value in model.learn(step, overflow).items():
            for record in here:
                record[f"step {number}, {name}"] = torch.tensor(value)
    for place, state in enumerate(model.states):
        if not state.layer.router["bias_rate"]:
            continue
        for rank, record in enumerate(here):
            record[f"step {number}, layer {place}, load"] = torch.tensor(state.load[rank])
        if step.update_biases:
            state.move_bias()
        for record in here:
            record[f"step {number}, layer {place}, bias"] = torch.tensor(state.bias)


def _inputs(program: Program, number: int, call: int) -> list[Tensor]:
    return [
        data.tokens(program, number, call, rank).double()
        for rank in range(program.steps[number].num_ranks)
    ]


def _outputs(program: Program, states: list[State], inputs: list[Tensor]) -> list[Tensor]:
    """Without training."""
    xs = [x.reshape(num_tokens(x.shape[:-1]), program.hidden) for x in inputs]
    for place in program.calls:
        outs, _ = states[place].call(xs, training=False)
        xs = [x + out for x, out in zip(xs, outs)] if program.residual else outs
    return [x.reshape(given.shape) for x, given in zip(xs, inputs)]


def _call(
    program: Program, states: list[State], number: int, call: int, records: list[Record]
) -> None:
    """One micro-batch of a step, with its backward pass."""
    step, at = program.steps[number], f"step {number}, call {call}"
    inputs, xs = _inputs(program, number, call), []
    for rank, x in enumerate(inputs):
        x.requires_grad_(program.x_requires_grad[rank])
        rows = num_tokens(step.shapes[call][rank])
        xs.append(x.reshape(rows, program.hidden))
    losses: list[Any] = [0.0] * len(records)
    for place in program.calls:
        outs, auxiliary = states[place].call(xs, step.training)
        xs = [x + out for x, out in zip(xs, outs)] if program.residual else outs
        for rank, one in enumerate(auxiliary or []):
            records[rank][f"{at}, layer {place}, auxiliary loss"] = one.detach()
            if step.with_auxiliary:
                losses[rank] = losses[rank] + one
    for rank, x in enumerate(xs):
        out = x.reshape(inputs[rank].shape)
        records[rank][f"{at}, out"] = out.detach()
        if program.loss == "sum":
            loss = out.sum()
        else:
            weights = data.loss_weights(program, number, call, rank).double()
            loss = (out * weights + out * out / 4).sum()
        losses[rank] = losses[rank] + loss / program.hidden
    loss = sum(losses)
    if step.mode != "backward":
        return
    if loss.requires_grad:
        loss.backward()
    for rank, x in enumerate(inputs):
        if x.requires_grad:
            zeros = torch.zeros_like(x)
            records[rank][f"{at}, x.grad"] = zeros if x.grad is None else x.grad


def _note_parameters(
    state: State, at: str, what: str, records: list[Record], average: bool = False
) -> None:
    """Each expert's, and each copy's, with the rank that it lives on."""
    for rank, record in enumerate(records):
        owned: dict[str, Tensor] = dict(state.dense[rank])
        for name, e in named_slots(state.slots[rank]):
            owned |= {f"{part}{name}": one for part, one in state.experts[e].items()}
        for name, one in owned.items():
            if what != "grad":
                record[f"{at}, {name} {what}"] = one.detach().clone()
            elif one.requires_grad:
                grad = torch.zeros_like(one) if one.grad is None else one.grad.clone()
                if average and name.startswith("experts"):
                    grad /= len(records)
                record[f"{at}, {name}.grad"] = grad


def named_slots(experts: tuple[int, ...] | list[int]) -> list[tuple[str, int]]:
    """A name for each place of a rank's stack, and its expert.

    >>> named_slots([3, 0, 3])
    [('[3]', 3), ('[0]', 0), ('[3] again', 3)]
    """
    return [
        (f"[{e}]" + " again" * list(experts[:local]).count(e), e) for local, e in enumerate(experts)
    ]
