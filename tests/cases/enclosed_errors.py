"""Calls of few tokens between nodes that fail, and what every rank is to say of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tokenyard
from tests.cases.clock import scaled

CULPRIT = 1


class Scene:
    """A Buffer between two nodes, whose ranks have heard by now what they will enclose."""

    def __init__(self, group: Any, per_node: int) -> None:
        self.rank = group.rank()
        self.buffer = tokenyard.Buffer(
            group, transport="hierarchical", ranks_per_node=per_node, timeout=scaled(60)
        )
        self.topk_idx = torch.arange(group.size()).expand(3, -1).contiguous()
        self.num_experts = group.size()
        for _ in range(2):
            self.got = self.dispatch()
            self.combine()

    def dispatch(self, hidden: int = 8, bad: bool = False, tag: int = -1) -> Any:
        topk_idx = self.topk_idx.clone()
        topk_idx[2, 1] = 99 if bad else 1
        return self.buffer.dispatch(
            torch.ones(3, hidden),
            topk_idx=topk_idx,
            topk_weights=torch.ones(topk_idx.shape),
            num_experts=self.num_experts,
            tag=tag,
        )

    def combine(self, rows: int = 0, tag: int = -1) -> Any:
        y = self.got.recv_x
        return self.buffer.combine(y[: len(y) - rows], self.got.handle, tag=tag)

    def again(self, tokens: int = 3) -> Any:
        return self.buffer.dispatch(torch.ones(tokens, 8), handle=self.got.handle)


# What the culprit does, and what the others do.
CALLS: dict[str, tuple[Callable[[Scene], Any], Callable[[Scene], Any], str]] = {
    "bad index": (lambda s: s.dispatch(bad=True), Scene.dispatch, "topk_idx[2, 1] is 99"),
    "too few rows": (lambda s: s.combine(rows=1), Scene.combine, "x has shape"),
    "too few tokens": (lambda s: s.again(2), Scene.again, "x has 2 tokens"),
    "hidden size": (lambda s: s.dispatch(hidden=9), Scene.dispatch, "differ in hidden size"),
    "tag of dispatch": (lambda s: s.dispatch(tag=1), Scene.dispatch, "differ in tag"),
    "tag of combine": (lambda s: s.combine(tag=1), Scene.combine, "differ in tag"),
    "another call": (Scene.combine, Scene.dispatch, "differ in what they call"),
    "another call too": (Scene.dispatch, Scene.combine, "differ in what they call"),
    "a cached one": (Scene.again, Scene.dispatch, "differ in what they call"),
}


def fail(group: Any, per_node: int) -> list[tuple[str, float]]:
    scene, said = Scene(group, per_node), []
    for wrong, right, _ in CALLS.values():
        text = "nothing"
        try:
            (wrong if scene.rank == CULPRIT else right)(scene)
        except (ValueError, tokenyard.TokenyardError) as error:
            text = f"{type(error).__name__}: {error}"
        scene.got = scene.dispatch()  # the Buffer goes on
        said.append((text, scene.combine().x[0, 0].item()))
    scene.buffer.close()
    return said


def check(results: list[list[tuple[str, float]]]) -> None:
    for rank, said in enumerate(results):
        for (name, (_, _, want)), (text, total) in zip(CALLS.items(), said, strict=True):
            assert want in text, f"{name}, on rank {rank}: {text}"
            kind = "CallMismatch: "
            if "differ" not in want:
                kind = "ValueError: " if rank == CULPRIT else "PeerInputError: rank 1 rejected"
            assert text.startswith(kind), f"{name}, on rank {rank}: {text}"
            assert total == len(results)
