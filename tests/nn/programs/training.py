"""A model of a program on one rank: its wrapper, its optimisers, and its steps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import tokenyard
from tests.nn.programs import data, optimisers
from tests.nn.programs.layer import Stack
from tests.nn.programs.oracle import GROWTH_INTERVAL, SCALE, named_slots
from tests.nn.programs.program import BY_HAND, Program, Slots, Step
from tokenyard.nn import (
    GradScaler,
    MoE,
    accept_gradients,
    auxiliary_losses,
    average_expert_gradients,
    clip_grad_norm_,
    expert_parameters,
    functional,
    prepare_for_ddp,
    sum_replica_gradients,
    update_biases,
)


class Trainee:
    def __init__(
        self,
        group: Any,
        buffers: list[tokenyard.Buffer],
        program: Program,
        number: int,
        *,
        to_load: bool,
    ) -> None:
        self.program, self.name = program, f"model {number}, " if number else ""
        self.rank, self.buffers = group.rank(), buffers
        self.stack = Stack(buffers, program, number, to_load=to_load)
        self.run: Any = self._wrap(group)
        self._parameters = list(self.stack.parameters())  # shards, which FSDP2 hides at times
        own = expert_parameters(self.stack)
        self.optimisers = optimisers.make(
            program.optimiser,
            [one for one in self.stack.parameters() if one not in own],
            [one for one in self.stack.parameters() if one in own],
            program.split,
        )
        self.scaler: GradScaler | None = None
        if program.scaler and self.optimisers:
            self.scaler = GradScaler(self.stack, init_scale=SCALE, growth_interval=GROWTH_INTERVAL)

    def _wrap(self, group: Any) -> Any:
        program = self.program
        if program.wrapper == "ddp":
            prepare_for_ddp(self.stack)
        elif program.average:
            average_expert_gradients(self.stack)
        if program.wrapper == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            alone = expert_parameters(self.stack)
            fully_shard(self.stack, mesh=mesh_of(group), ignored_params=alone)
        run: Any = self.stack
        if program.compiled == "inside":
            run = torch.compile(run, backend="eager")
        if program.wrapper == "ddp":
            run = DistributedDataParallel(run, process_group=group)
        if program.compiled == "outside":
            run = torch.compile(run, backend="eager")
        return run

    def step(self, number: int, slots: Slots, record: dict[str, Tensor]) -> None:
        """`slots` are those of the first layer."""
        step = self.program.steps[number]
        self.run.train(step.training)
        for one in self._parameters:
            one.grad = None
        scaler = self.scaler if step.learning_rate else None
        for call in range(len(step.shapes)):
            self._call(number, call, scaler, record)
        if step.mode == "backward":
            if self.program.synced and self.program.wrapper == "none":
                self._sum_dense()
            sum_replica_gradients(self.stack)
            overflow = self.program.overflows(step, slots)
            if overflow is not None:
                self._overflow(step, overflow)
            if scaler is not None:
                for optimiser in self.optimisers:
                    scaler.unscale_(optimiser)
            if overflow is None:
                self._note_gradients(f"step {number}", record)
        if step.learning_rate:
            self._learn(step, f"step {number}", scaler, record)
        loads = [_copy(moe.router.load) for moe in self._layers()]
        if step.update_biases:
            update_biases(self.stack)
        for place, (moe, load) in enumerate(zip(self._layers(), loads)):
            if load is not None:
                record[f"step {number}, layer {place}, load"] = load
                record[f"step {number}, layer {place}, bias"] = moe.router.bias.clone()

    def _call(
        self, number: int, call: int, scaler: GradScaler | None, record: dict[str, Tensor]
    ) -> None:
        program = self.program
        step, at = program.steps[number], f"step {number}, call {call}"
        x = data.tokens(program, number, call, self.rank)
        x.requires_grad_(program.x_requires_grad[self.rank])
        backward = step.mode == "backward"
        without = torch.inference_mode if step.mode == "inference" else torch.no_grad
        is_ddp, last = isinstance(self.run, DistributedDataParallel), call + 1 == len(step.shapes)
        with self.run.no_sync() if is_ddp and not last else nullcontext():
            with nullcontext() if backward else without():
                out = self.run(x)
            record[f"{at}, out"] = out.detach().clone()
            if step.training:
                self._note_auxiliary(at, record)
            if not backward:
                return
            if program.loss == "sum":
                loss = out.sum()
            else:
                weights = data.loss_weights(program, number, call, self.rank)
                loss = (out * weights + out * out / 4).sum()
            loss = loss / program.hidden
            if step.training and step.with_auxiliary:
                loss = loss + auxiliary_losses(self.stack)
            if loss.requires_grad:
                (loss if scaler is None else scaler.scale(loss)).backward()
        if x.requires_grad:
            scale = 1.0 if scaler is None else scaler.get_scale()
            record[f"{at}, x.grad"] = torch.zeros_like(x) if x.grad is None else x.grad / scale

    def _note_auxiliary(self, at: str, record: dict[str, Tensor]) -> None:
        with torch.no_grad():  # of reentrant checkpointing there is no more than the value
            for place, moe in enumerate(self._layers()):
                auxiliary = auxiliary_losses(moe)
                if isinstance(auxiliary, Tensor):
                    record[f"{at}, layer {place}, auxiliary loss"] = auxiliary.clone()

    def _note_gradients(self, at: str, record: dict[str, Tensor]) -> None:
        for place, moe in enumerate(self._layers()):
            parameters = dict(moe.named_parameters())
            frozen = [name for name, one in parameters.items() if not one.requires_grad]
            assert all(parameters[name].grad is None for name in frozen), f"a grad of {frozen}"
            grads = {
                name: torch.zeros_like(one) if one.grad is None else one.grad
                for name, one in parameters.items()
                if one.requires_grad
            }
            for name, grad in named(moe, grads).items():
                record[f"{at}, layer {place}, {name}.grad"] = grad.clone()

    def _overflow(self, step: Step, what: str) -> None:
        """In one number: of one rank's experts, or of a dense parameter, which ranks have averaged,
        on all.
        """
        assert step.overflow is not None
        name = "router.weight"
        if what == "experts":
            layer = self.program.layers[0]
            name = "experts.first" if layer.adapter else "experts.down"
        if self.rank == step.overflow[0] or what == "dense":
            grad = self._layers()[0].get_parameter(name).grad
            assert grad is not None
            grad.view(-1)[-1] = torch.inf
            accept_gradients(self.stack)

    def _sum_dense(self) -> None:
        """Over ranks, by hand: the sum, or the mean."""
        for moe in self._layers():
            for name, parameter in moe.named_parameters():
                if not parameter.requires_grad or name.startswith("experts"):
                    continue
                grad = parameter.grad
                grad = torch.zeros_like(parameter) if grad is None else grad
                total = functional.sum_over_ranks(moe.buffer, grad.flatten()).view(grad.shape)
                parameter.grad = total / (moe.buffer.group_size if self.program.average else 1)

    def _learn(
        self, step: Step, at: str, scaler: GradScaler | None, record: dict[str, Tensor]
    ) -> None:
        program = self.program
        if program.optimiser == BY_HAND:
            if not program.synced:
                self._sum_dense()
            for one in self.stack.parameters():  # small steps: rounding grows with the numbers
                if one.grad is not None:
                    one.data -= step.learning_rate / program.hidden * one.grad.clamp(-1, 1)
            return
        if not self.optimisers:
            return
        if program.clip is not None:
            record[f"{at}, norm"] = clip_grad_norm_(self.run, *program.clip)
        optimisers.set_rate(self.optimisers, step.learning_rate)
        for optimiser in self.optimisers:
            if scaler is None:
                optimiser.step()
            else:
                scaler.step(optimiser)
        if scaler is not None:
            scaler.update()
            record[f"{at}, scale"] = torch.tensor(scaler.get_scale())

    def _layers(self) -> list[Any]:
        return list(self.stack.layers)


def named(moe: MoE, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts by their global ids; whole, if they are sharded."""
    found: dict[str, Tensor] = {}
    for name, given in tensors.items():
        tensor = given.full_tensor() if hasattr(given, "full_tensor") else given
        plain = name.replace("base_layer.", "")
        if plain.startswith("experts"):
            slots = enumerate(named_slots(moe.experts.ids))
            found |= {f"{plain}{slot}": tensor[local] for local, (slot, _) in slots}
        else:
            found[plain] = tensor
    return found


_meshes: dict[Any, DeviceMesh] = {}  # by group


def mesh_of(group: Any) -> DeviceMesh:
    if group not in _meshes:
        _meshes[group] = DeviceMesh.from_group(group, "cpu")
    return _meshes[group]


def note_parameters(stack: nn.Module, at: str, record: dict[str, Tensor]) -> None:
    moe: Any
    for place, moe in enumerate(stack.get_submodule("layers").children()):
        for name, one in named(moe, dict(moe.named_parameters())).items():
            record[f"{at}layer {place}, {name} at the end"] = one.detach().clone()


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
