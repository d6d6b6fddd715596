"""Calls of a Buffer pass no gradient on: who would lose one is told, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.nn.exchange import NUM_EXPERTS, routed
from tokenyard.nn import functional as tf
from tokenyard.testing import run_virtual

NUM_TOKENS, HIDDEN = 4, 8


class Scene:
    def __init__(self, group: Any) -> None:
        self.buffer = tokenyard.Buffer(group, low_latency_mode=True)
        self.x = torch.ones(NUM_TOKENS, HIDDEN)
        self.topk_idx, self.weights = routed(0, NUM_TOKENS, "uniform")
        got = self.dispatch()
        self.rows, self.handle = got.recv_x, got.handle
        slots = self.low_latency_dispatch()
        self.slots, self.slot_handle = slots.recv_x.clone(), slots.handle
        self.low_latency_combine()

    def dispatch(self, **changes: Any) -> Any:
        given = {"x": self.x, "topk_idx": self.topk_idx, "topk_weights": self.weights}
        return self.buffer.dispatch(**{**given, "num_experts": NUM_EXPERTS, **changes})

    def low_latency_dispatch(self, **changes: Any) -> Any:
        x = changes.get("x", self.x)
        return self.buffer.low_latency_dispatch(x, self.topk_idx, 8, NUM_EXPERTS, use_fp8=False)

    def low_latency_combine(self, **changes: Any) -> Any:
        given = {"x": self.slots, "topk_weights": self.weights, **changes}
        return self.buffer.low_latency_combine(
            topk_idx=self.topk_idx, handle=self.slot_handle, **given
        )


def wants(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


CALLS: dict[str, tuple[str, Callable[[Scene], Any]]] = {
    "dispatch": ("x", lambda s: s.dispatch(x=wants(s.x))),
    "dispatch-scales": ("x[1] (scales)", lambda s: s.dispatch(x=(s.x, wants(s.x[:, :1])))),
    "dispatch-weights": ("topk_weights", lambda s: s.dispatch(topk_weights=wants(s.weights))),
    "cached": ("x", lambda s: s.buffer.dispatch(wants(s.x), handle=s.handle)),
    "combine": ("x", lambda s: s.buffer.combine(wants(s.rows), s.handle)),
    "combine-bias": ("bias", lambda s: s.buffer.combine(s.rows, s.handle, bias=wants(s.x))),
    "low-latency-dispatch": ("x", lambda s: s.low_latency_dispatch(x=wants(s.x))),
    "low-latency-combine": ("x", lambda s: s.low_latency_combine(x=wants(s.slots))),
    "low-latency-weights": (
        "topk_weights",
        lambda s: s.low_latency_combine(topk_weights=wants(s.weights)),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_drops_a_gradient_says_so(name: str) -> None:
    what, call = CALLS[name]

    def job(group: Any) -> list[str]:
        scene = Scene(group)
        with warnings.catch_warnings(record=True) as told, scene.buffer:
            warnings.simplefilter("default")
            for _ in range(3):
                call(scene)
        assert all(one.filename == __file__ for one in told)
        return [str(one.message) for one in told]

    assert run_virtual(job, 1).results[0] == [
        f"{what} requires grad, and this call passes no gradient on: take tokenyard.nn.functional, "
        f"or give {what}.detach()"
    ]


class Function(torch.autograd.Function):
    """As users of DeepEP write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scene: Scene) -> Any:
        return scene.dispatch(x=x).recv_x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None


def test_who_takes_care_of_gradients_is_told_nothing() -> None:
    def job(group: Any) -> None:
        scene = Scene(group)
        with scene.buffer as buffer:
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    for _, call in CALLS.values():
                        call(scene)
            assert Function.apply(wants(scene.x), scene).requires_grad
            x, weights = wants(scene.x), wants(scene.weights)
            rows = tf.dispatch(buffer, x, scene.topk_idx, weights, NUM_EXPERTS)
            grouped = tf.permute(rows.x, rows.topk_idx, NUM_EXPERTS)
            y = tf.unpermute(grouped.x, grouped.row_of, rows.topk_weights)
            tf.combine(buffer, y, rows).sum().backward()
            assert x.grad is not None
            assert weights.grad is not None

    run_virtual(job, 1)
