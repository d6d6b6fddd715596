"""How tokens choose experts: uniformly, by groups, or by a skewed load; and whom they reach.

Letters besides those of `types`: S sets of experts, such as ranks or nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """How tokens choose num_topk different experts, independently of each other.

    Uniform unless `load` says otherwise. With groups, a token first chooses num_topk_groups of
    num_groups groups of consecutive experts, and then experts of these.
    """

    num_experts: int
    num_topk: int
    num_groups: int = 1
    num_topk_groups: int = 1
    load: np.ndarray | None = None  # [E], each expert's share of the pairs

    def __post_init__(self) -> None:
        if not 0 < self.num_topk <= self.num_experts:
            raise ValueError(f"num_topk is {self.num_topk}, want 1..{self.num_experts}")
        if self.num_experts % self.num_groups or self.num_topk_groups > self.num_groups:
            raise ValueError(
                f"{self.num_topk_groups} of {self.num_groups} groups: want groups that divide "
                f"{self.num_experts} experts, and no more than there are"
            )
        if self.num_topk > self.num_experts // self.num_groups * self.num_topk_groups:
            raise ValueError(
                f"{self.num_topk_groups} groups have fewer than {self.num_topk} experts"
            )

    @staticmethod
    def zipf(num_experts: int, num_topk: int, exponent: float = 1.0, seed: int = 0) -> Routing:
        """Shares proportional to 1 / place**exponent, of experts in a random order."""
        share = 1.0 / np.arange(1, num_experts + 1) ** exponent
        share = np.random.default_rng(seed).permutation(share)
        return Routing(num_experts=num_experts, num_topk=num_topk, load=share / share.sum())

    def reach(self, set_of_expert: np.ndarray, num_sets: int) -> np.ndarray:
        """[S]: the probability that a token chooses at least one expert of each set.

        Of 4 experts a token chooses 2; a set of two is missed if it chooses the other two:

        >>> Routing(num_experts=4, num_topk=2).reach(np.array([0, 0, 1, 1]), 2).round(3).tolist()
        [0.833, 0.833]
        """
        sizes = np.bincount(set_of_expert, minlength=num_sets).astype(float)
        if self.load is not None:
            return 1.0 - _missed_by_odds(self._odds(), self.num_topk, set_of_expert, num_sets)
        if self.num_groups == 1:
            return 1.0 - _missed(sizes, self.num_experts, self.num_topk)
        return self._reach_groups(set_of_expert, sizes)

    def pairs(self, set_of_expert: np.ndarray, num_sets: int) -> np.ndarray:
        """[S]: how many of a token's experts are in each set, on average."""
        if self.load is None:
            sizes = np.bincount(set_of_expert, minlength=num_sets)
            return self.num_topk * sizes / self.num_experts
        chosen = self.reach(np.arange(self.num_experts), self.num_experts)
        return np.bincount(set_of_expert, chosen, num_sets)

    def _odds(self) -> np.ndarray:
        """[E]: odds that a clock of each expert, as fast as its load, has rung when those of
        num_topk experts have on average.
        """
        assert self.load is not None
        low, high = 0.0, 1.0
        while (1.0 - np.exp(-high * self.load)).sum() < self.num_topk and high < 1e12:
            high *= 2.0
        for _ in range(60):
            middle = (low + high) / 2.0
            if (1.0 - np.exp(-middle * self.load)).sum() < self.num_topk:
                low = middle
            else:
                high = middle
        return np.expm1(np.minimum(high * self.load, 500.0))

    def _reach_groups(self, set_of_expert: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Sets lie evenly in the groups that they touch: true if these divide each other."""
        each = self.num_experts // self.num_groups
        group = np.arange(self.num_experts) // each
        touched = np.zeros((len(sizes), self.num_groups), bool)
        touched[set_of_expert, group] = True
        chosen, total = self.num_topk_groups, self.num_groups
        missed = np.zeros(len(sizes))
        for number in np.unique(touched.sum(1)):
            here = touched.sum(1) == number
            for both in range(max(0, chosen + number - total), min(chosen, number) + 1):
                ways = _choose(number, both) * _choose(total - number, chosen - both)
                share = ways / _choose(total, chosen)
                inside = sizes[here] * both / max(number, 1)
                missed[here] += share * _missed(inside, each * chosen, self.num_topk)
        return 1.0 - missed


def _missed(sizes: np.ndarray, num_experts: int, num_topk: int) -> np.ndarray:
    """The probability that num_topk different experts all lie outside sets of these sizes."""
    missed = np.ones_like(sizes)
    for taken in range(num_topk):
        missed *= np.maximum(num_experts - sizes - taken, 0.0) / (num_experts - taken)
    return missed


def _missed_by_odds(
    odds_E: np.ndarray, num_topk: int, set_of_expert: np.ndarray, num_sets: int
) -> np.ndarray:
    """[S]: the probability that the num_topk experts, of which each takes part with these odds, all
    lie outside each set.

    It is the coefficient of x**num_topk in the product of 1 + odds * x over experts outside the
    set, divided by that of all. Products of the sets before and after each one give it.
    """
    width = num_topk + 1

    def times(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        product = np.convolve(one, other)[:width]
        return product / product.max()

    order = np.argsort(set_of_expert, kind="stable")
    inside = [np.eye(1, width)[0] for _ in range(num_sets)]
    for expert in order:
        factor = np.zeros(width)
        factor[:2] = 1.0, odds_E[expert]
        inside[set_of_expert[expert]] = times(inside[set_of_expert[expert]], factor)
    before, after = [np.eye(1, width)[0]], [np.eye(1, width)[0]]
    for one, last in zip(inside, reversed(inside)):
        before.append(times(before[-1], one))
        after.append(times(after[-1], last))
    missed = np.empty(num_sets)
    for number, one in enumerate(inside):
        others = np.convolve(before[number], after[num_sets - 1 - number])[:width]
        missed[number] = others[num_topk] * one[0] / np.convolve(others, one)[num_topk]
    return missed


def _choose(total: int, chosen: int) -> float:
    factors = [(total - place) / (chosen - place) for place in range(chosen)]
    return float(np.prod(factors)) if 0 <= chosen <= total else 0.0
