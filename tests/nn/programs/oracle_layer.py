"""One layer of the oracle, by plain loops: one process that has all experts, tokens one by one. In
float64, whatever the program's dtype.

Nothing here comes from tokenyard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.nn.programs import data
from tests.nn.programs.program import ADAPTERS, DENSE, EXPERTS, Program, Slots

_OWN = (*EXPERTS, *ADAPTERS)  # what an expert has
# A choice closer than this may be another one after rounding.
_MARGINS = {"float64": 1e-5, "float32": 1e-4, "bfloat16": 1e-5}


class NearTie(Exception):
    """Choices of the program depend on rounding."""


class State:
    """One layer. Every rank has dense parameters of its own, which stay equal."""

    def __init__(self, program: Program, place: int, model: int = 0) -> None:
        self.layer = layer = program.layers[place]
        self.slots = layer.slots
        self.margin = _MARGINS[program.dtype]
        first = {name: one.double() for name, one in data.parameters(program, place, model).items()}
        self.dense: list[dict[str, Tensor]] = []
        for _ in range(program.num_ranks):
            mine = {name: one.clone() for name, one in first.items() if name not in _OWN}
            self.dense.append(mine)
        self.experts = [
            {name: first[name][e].clone() for name in _OWN if name in first}
            for e in range(layer.num_experts)
        ]
        for part, names in DENSE.items():
            for mine in self.dense:
                for name in names:
                    if name in mine:
                        mine[name].requires_grad_(part not in layer.frozen)
        for expert in self.experts:
            for name, one in expert.items():
                one.requires_grad_(name in ADAPTERS or "experts" not in layer.frozen)
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
            inner = x @ expert["experts.gate_up"]
            if self.layer.adapter:
                inner = inner + x @ expert["experts.first"] @ expert["experts.second"]
            out = out + weight * _gated(inner) @ expert["experts.down"]
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

    def move_bias(self) -> None:
        rate = self.layer.router["bias_rate"]
        total = [sum(load[e] for load in self.load) for e in range(self.layer.num_experts)]
        for e, number in enumerate(total):
            above = number * len(total) - sum(total)  # as many times the mean as there are experts
            self.bias[e] += rate * ((above < 0) - (above > 0))
        self.load = [[0] * len(total) for _ in self.load]

    def move(self, slots: Slots) -> None:
        """Experts live elsewhere now, perhaps on other ranks."""
        self.slots = slots
        self.dense = self.dense[:1]
        for _ in slots[1:]:
            others = {
                name: one.detach().clone().requires_grad_(one.requires_grad)
                for name, one in self.dense[0].items()
            }
            self.dense.append(others)

    def forget_load(self) -> None:
        self.load = [[0] * self.layer.num_experts for _ in self.dense]

    def sum_gradients(self, average: bool) -> None:
        """Those of dense parameters over ranks, of which the mean is taken, or not; that of an
        expert is a sum already.
        """
        number = len(self.dense) if average else 1
        for name, first in self.dense[0].items():
            if first.requires_grad:
                grads = [mine[name].grad for mine in self.dense]
                total = sum((one for one in grads if one is not None), torch.zeros_like(first))
                for mine in self.dense:
                    mine[name].grad = total / number
        for expert in self.experts:
            for one in expert.values():
                if one.requires_grad:
                    one.grad = torch.zeros_like(one) if one.grad is None else one.grad / number

    def dense_equal(self) -> None:
        """Let all ranks have what the first has learnt."""
        with torch.no_grad():
            for mine in self.dense[1:]:
                for name, one in mine.items():
                    one.copy_(self.dense[0][name])


def _gated(both: Tensor) -> Tensor:
    gate, up = both[: len(both) // 2], both[len(both) // 2 :]
    return gate / (1 + (-gate).exp()) * up
