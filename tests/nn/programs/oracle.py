"""What a program must give, by plain loops: one process that has all experts, tokens one by one,
and autograd for the gradients. In float64, whatever the program's dtype.

Nothing here comes from tokenyard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.nn.programs import data
from tests.nn.programs.draw import DENSE, EXPERTS, Program, num_tokens

Record = dict[str, Tensor]  # what there is to compare, by name

# A choice closer than this may be another one after rounding.
_MARGINS = {"float64": 1e-5, "float32": 1e-4, "bfloat16": 1e-5}


class NearTie(Exception):
    """Choices of the program depend on rounding."""


class _State:
    """One layer. Every rank has dense parameters of its own, which stay equal."""

    def __init__(self, program: Program, place: int) -> None:
        self.layer = layer = program.layers[place]
        self.margin = _MARGINS[program.dtype]
        first = {name: one.double() for name, one in data.parameters(program, place).items()}
        self.dense: list[dict[str, Tensor]] = []
        for _ in range(program.num_ranks):
            mine = {name: one.clone() for name, one in first.items() if name not in EXPERTS}
            self.dense.append(mine)
        self.experts = [
            {name: first[name][e].clone() for name in EXPERTS} for e in range(layer.num_experts)
        ]
        for part, names in DENSE.items():
            for mine in self.dense:
                for name in names:
                    if name in mine:
                        mine[name].requires_grad_(part not in layer.frozen)
        for expert in self.experts:
            for one in expert.values():
                one.requires_grad_("experts" not in layer.frozen)
        self.bias = [0.0] * layer.num_experts
        self.load = [[0] * layer.num_experts for _ in range(program.num_ranks)]

    def leaves(self) -> list[Tensor]:
        return [one for part in (*self.dense, *self.experts) for one in part.values()]

    def call(self, xs: list[Tensor], training: bool) -> tuple[list[Tensor], list[Tensor] | None]:
        """The outputs [T, D] of each rank, and its auxiliary losses if there are any."""
        options = self.layer.router
        outs, shares = [], []
        counts = [[0] * self.layer.num_experts for _ in xs]
        for rank, x in enumerate(xs):
            rows, share = [], torch.zeros(self.layer.num_experts, dtype=torch.float64)
            for token in x:
                out, scores, chosen = self._token(rank, token)
                rows.append(out)
                share = share + scores / scores.sum() / len(x)
                for e in chosen:
                    counts[rank][e] += 1
            outs.append(torch.stack(rows) if rows else x * 1.0)
            shares.append(share)
        if not training:
            return outs, None
        if options["bias_rate"]:
            for load, count in zip(self.load, counts):
                for e, number in enumerate(count):
                    load[e] += number
        if not options["auxiliary_loss"]:
            return outs, None
        total = [sum(count[e] for count in counts) for e in range(self.layer.num_experts)]
        losses = []
        for share in shares:
            loss = torch.zeros((), dtype=torch.float64)
            for e, number in enumerate(total):
                loss = loss + number / max(1, sum(total)) * share[e]
            losses.append(options["auxiliary_loss"] * self.layer.num_experts * loss)
        return outs, losses

    def _token(self, rank: int, x: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """(output [D], scores [E], the experts that it chose)"""
        mine, options = self.dense[rank], self.layer.router
        logits = mine["router.weight"] @ x
        if options["score"] == "softmax":
            powers = (logits - logits.max().detach()).exp()
            scores = powers / powers.sum()
        else:
            scores = 1 / (1 + (-logits).exp())
        chosen = self._choose([s + b for s, b in zip(scores.tolist(), self.bias)])
        total = sum(scores[e] for e in chosen) if options["normalise"] else 1.0
        out = torch.zeros_like(x)
        for e in chosen:
            weight = options["scale"] * scores[e] / total
            expert = self.experts[e]
            out = out + weight * _gated(x @ expert["experts.gate_up"]) @ expert["experts.down"]
        if self.layer.shared:
            inner = _gated(mine["shared.gate_up.weight"] @ x)
            out = out + mine["shared.down.weight"] @ inner
        return out, scores, chosen

    def _choose(self, scores: list[float]) -> list[int]:
        options = self.layer.router
        size = self.layer.num_experts // options["num_groups"]
        groups = []
        for first in range(0, self.layer.num_experts, size):
            best = sorted((scores[e] for e in range(first, first + size)), reverse=True)[:2]
            groups.append((sum(best), first))
        kept = self._best(groups, options["num_kept_groups"])
        left = [(scores[e], e) for first in kept for e in range(first, first + size)]
        return self._best(left, options["num_topk"])

    def _best(self, scored: list[tuple[float, int]], number: int) -> list[int]:
        scored = sorted(scored, reverse=True)
        if number < len(scored) and scored[number - 1][0] - scored[number][0] < self.margin:
            raise NearTie
        return [one for _, one in scored[:number]]

    def learn(self, rate: float, average: bool) -> None:
        """A step of gradient descent with the sum over ranks, or their mean, between -1 and 1."""
        number = len(self.dense) if average else 1
        with torch.no_grad():
            for name in self.dense[0]:
                grads = [mine[name].grad for mine in self.dense]
                total = sum(grad for grad in grads if grad is not None)
                for mine in self.dense:
                    mine[name] -= rate * torch.as_tensor(total / number).clamp(-1, 1)
            for expert in self.experts:
                for one in expert.values():
                    if one.grad is not None:
                        one -= rate * (one.grad / number).clamp(-1, 1)

    def move_bias(self) -> None:
        rate = self.layer.router["bias_rate"]
        total = [sum(load[e] for load in self.load) for e in range(self.layer.num_experts)]
        for e, number in enumerate(total):
            above = number * len(total) - sum(total)  # as many times the mean as there are experts
            self.bias[e] += rate * ((above < 0) - (above > 0))
        self.load = [[0] * len(total) for _ in self.load]


def expect(program: Program) -> list[Record]:
    """Of each rank."""
    states = [_State(program, place) for place in range(len(program.layers))]
    records: list[Record] = [{} for _ in range(program.num_ranks)]
    for number, step in enumerate(program.steps):
        for state in states:
            for leaf in state.leaves():
                leaf.grad = None
        for call in range(len(step.shapes)):
            _call(program, states, number, call, records)
        if step.mode == "backward":
            for place, state in enumerate(states):
                _note_parameters(program, state, f"step {number}, layer {place}", "grad", records)
        if step.learning_rate:
            for state in states:
                state.learn(step.learning_rate / program.hidden, program.average)
        for place, state in enumerate(states):
            if not state.layer.router["bias_rate"]:
                continue
            for rank, record in enumerate(records):
                record[f"step {number}, layer {place}, load"] = torch.tensor(state.load[rank])
            if step.update_biases:
                state.move_bias()
            for record in records:
                record[f"step {number}, layer {place}, bias"] = torch.tensor(state.bias)
    for place, state in enumerate(states):
        _note_parameters(program, state, f"layer {place}", "at the end", records)
    return records


def _call(
    program: Program, states: list[_State], number: int, call: int, records: list[Record]
) -> None:
    """One micro-batch of a step, with its backward pass."""
    step, at = program.steps[number], f"step {number}, call {call}"
    inputs, xs = [], []
    for rank in range(program.num_ranks):
        x = data.tokens(program, number, call, rank).double()
        inputs.append(x.requires_grad_(program.x_requires_grad[rank]))
        rows = num_tokens(step.shapes[call][rank])
        xs.append(x.reshape(rows, program.hidden))
    losses: list[Any] = [0.0] * program.num_ranks
    for place, state in enumerate(states):
        outs, auxiliary = state.call(xs, step.training)
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
    program: Program, state: _State, at: str, what: str, records: list[Record]
) -> None:
    """Each expert's with the rank that it lives on."""
    layer = state.layer
    for rank, record in enumerate(records):
        owned: dict[str, Tensor] = dict(state.dense[rank])
        for e, expert in enumerate(state.experts):
            if layer.rank_of_expert[e] == rank:
                owned |= {f"{name}[{e}]": one for name, one in expert.items()}
        for name, one in owned.items():
            if what != "grad":
                record[f"{at}, {name} {what}"] = one.detach().clone()
            elif one.requires_grad:
                grad = torch.zeros_like(one) if one.grad is None else one.grad.clone()
                if program.average and name.startswith("experts"):
                    grad /= program.num_ranks
                record[f"{at}, {name}.grad"] = grad


def _gated(both: Tensor) -> Tensor:
    gate, up = both[: len(both) // 2], both[len(both) // 2 :]
    return gate / (1 + (-gate).exp()) * up
