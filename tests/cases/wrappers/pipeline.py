"""Twenty steps of a model in two stages, each of them with experts on ranks of its own."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import tokenyard
from tests.cases.nn.moe import CONFIG, HIDDEN
from tests.cases.wrappers.layer import NUM_STEPS, parameters
from tokenyard.nn import (
    MoE,
    average_expert_gradients,
    expert_parameters,
    prepare_for_ddp,
    update_biases,
)

NUM_TOKENS, NUM_PIECES = 48, 3  # of all ranks; micro-batches of a step
# A stage has no way to add a loss of its own to that of the last one.
ROUTER = dataclasses.replace(CONFIG, auxiliary_loss=0.0)
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Stage(nn.Module):
    def __init__(self, buffer: tokenyard.Buffer) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(buffer, HIDDEN, 24, ROUTER)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.first(x))


def make_stage(buffer: tokenyard.Buffer, number: int) -> Stage:
    torch.manual_seed(number)
    return Stage(buffer)


def batch(step: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    mine = x.chunk(num_ranks)[rank]
    return mine, mine.roll(1, 1)


def loss_of_a_piece(y: Tensor, want: Tensor) -> Tensor:
    """Its part of a step's loss. A schedule that scaled gradients itself would change them after
    the backward pass, which looks like clipping.
    """
    return mse_loss(y, want) / NUM_PIECES


def alone(group: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Both stages, on one rank."""
    with tokenyard.Buffer(group) as buffer:
        stages = nn.ModuleList(make_stage(buffer, number) for number in range(2))
        average_expert_gradients(stages)
        optimizer = torch.optim.SGD(stages.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            x, want = batch(step, 0, 1)
            loss = mse_loss(stages[1](stages[0](x)), want)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            update_biases(stages)
        return losses, parameters(stages)


def train(group: Any, schedule: str, dense: str) -> tuple[list[float], dict[str, Tensor]]:
    """Ranks 0 and 1 are the first stage, 2 and 3 the second; 0 and 2 are one pipeline."""
    number, place = divmod(group.rank(), 2)
    of_stage = [dist.new_group([0, 1]), dist.new_group([2, 3])][number]
    of_pipeline = [dist.new_group([0, 2]), dist.new_group([1, 3])][place]
    with tokenyard.Buffer(of_stage) as buffer, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = make_stage(buffer, number)
        wrapped: nn.Module = model
        if dense == "ddp":
            prepare_for_ddp(model)
            wrapped = DistributedDataParallel(model, process_group=of_stage)
        else:
            average_expert_gradients(model)
        piece = NUM_TOKENS // 2 // NUM_PIECES, HIDDEN
        # Without them the stage finds out by a call of its own, which the router would count.
        shapes: dict[str, Any] = {
            "input_args": torch.empty(piece, requires_grad=number > 0),
            "output_args": torch.empty(piece, requires_grad=True),
        }
        device = torch.device("cpu")
        stage = PipelineStage(wrapped, number, 2, device, group=of_pipeline, **shapes)
        run = SCHEDULES[schedule](stage, NUM_PIECES, loss_of_a_piece, scale_grads=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            x, want = batch(step, place, 2)
            if number == 0:
                run.step(x)
            else:
                of_pieces: list[Tensor] = []
                run.step(target=want, losses=of_pieces)
                losses.append(torch.stack(of_pieces).sum().item())
            if dense != "ddp":
                _average(model, of_stage)
            optimizer.step()
            update_biases(model)
        del wrapped, stage, run
        return losses, {f"{number}.{name}": one for name, one in parameters(model).items()}


def _average(model: nn.Module, group: Any) -> None:
    own = expert_parameters(model)
    for one in model.parameters():
        if one not in own:
            dist.all_reduce(one.grad, dist.ReduceOp.AVG, group)
