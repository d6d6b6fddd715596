"""Random programs of the layer against loops over tokens and experts on one process: 100 in the
gate, 1,100 more at night (or `python -m tests.nn.programs`, which prints a program that fails).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenyard
from tests.nn.programs import training
from tests.nn.programs.draw import draw
from tests.nn.programs.oracle import NearTie, Record, expect
from tests.nn.programs.program import Layer, Move, Program, Step
from tests.nn.programs.run import Ranks, run
from tokenyard.nn import (
    MoE,
    RouterConfig,
    average_expert_gradients,
    clipping,
    functional,
    moving,
    scaling,
)
from tokenyard.testing import run_virtual


def check(seeds: range, num_processes: int = 0) -> None:
    failures = [failure for *_, failure in run(seeds, num_processes) if failure is not None]
    assert not failures, "\n\n".join(map(str, failures[:3]))


@pytest.mark.processes
@pytest.mark.timeout(600)  # kernels are compiled, where nobody has done so yet
@pytest.mark.parametrize("first", [0, 50])
def test_programs(first: int) -> None:
    check(range(first, first + 50))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(7200)
def test_very_many_programs() -> None:
    check(range(100, 1100))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
def test_programs_on_4_processes() -> None:
    check(range(100), 4)


def make_program(attempt: int) -> Program:
    """Two layers on 3 ranks, which do all that training does."""
    options = {
        "num_experts": 6,
        "num_topk": 2,
        "score": "sigmoid",
        "normalise": True,
        "scale": 2.5,
        "num_groups": 3,
        "num_kept_groups": 2,
        "auxiliary_loss": 0.5,
        "bias_rate": 0.1,
    }
    layer = Layer(
        router=options,
        intermediate=5,
        shared=3,
        frozen=(),
        slots=((1, 4), (0, 3, 5), (2,)),
        placed=True,
        num_worst_tokens=0,
    )
    step = Step(
        shapes=(((4,), (5,), (3,)), ((2, 3), (0, 3), (1, 3))),
        training=True,
        mode="backward",
        with_auxiliary=True,
        learning_rate=0.4,
        update_biases=True,
    )
    return Program(
        seed=0,
        attempt=attempt,
        num_ranks=3,
        transport="collective",
        kernels="numba",
        ranks_per_node=None,
        dtype="float64",
        hidden=7,
        layers=(layer, layer),
        own_buffers=False,
        residual=True,
        checkpoint="none",
        average=True,
        strides="plain",
        x_requires_grad=(True, True, True),
        loss="weighted",
        steps=(step, step),
    )


def make_moving_program(attempt: int) -> Program:
    """Experts with copies move, with a copy of the model that is left behind at first, and one rank
    overflows.
    """
    program = make_program(attempt)
    first, then = ((1, 4, 1), (0, 3, 5), (2,)), ((0, 2), (1, 5), (3, 4, 5, 0, 0))
    step = program.steps[0]
    return replace(
        program,
        layers=tuple(replace(one, slots=first) for one in program.layers),
        steps=(
            step,
            replace(step, move=Move(slots=(then,), how="behind")),
            replace(step, overflow=(2, "experts")),
            step,
        ),
        ema=True,
        optimiser="adam",
        clip=(0.5, 2.0),
        scaler=True,
    )


def without_ties(make: Callable[[int], Program]) -> tuple[Program, list[Record]]:
    for attempt in range(50):
        try:
            program = make(attempt)
            return program, expect(program)
        except NearTie:
            continue
    raise AssertionError("50 programs have choices that are nearly tied")


@pytest.fixture(scope="module")
def whole() -> tuple[Program, list[Record]]:
    return without_ties(make_program)


@pytest.fixture(scope="module")
def moving_whole() -> tuple[Program, list[Record]]:
    return without_ties(make_moving_program)


def test_the_whole_program(whole: tuple[Program, list[Record]]) -> None:
    """The checks below break it: unbroken it is right, and so are ways that change no number."""
    program, want = whole
    again = replace(program, checkpoint="model", strides="gapped", transport="direct")
    for one in (program, again):
        assert Ranks().problems(one, want) == []


def with_option(name: str, value: Any) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        last = program.layers[-1]
        layers = *program.layers[:-1], replace(last, router={**last.router, name: value})
        return replace(program, layers=layers)

    return change


def with_step(**changed: Any) -> Callable[[Program], Program]:
    return lambda program: replace(
        program, steps=(replace(program.steps[0], **changed), *program.steps[1:])
    )


@pytest.mark.parametrize(
    "change, first",
    [
        pytest.param(with_option("scale", 2.4), "step 0, call 0, out", id="scale"),
        pytest.param(with_option("normalise", False), "step 0, call 0, out", id="normalise"),
        pytest.param(with_option("score", "softmax"), "step 0, call 0, layer 1", id="score"),
        pytest.param(with_option("num_kept_groups", 3), "step 0, call 0, ", id="groups"),
        pytest.param(with_option("auxiliary_loss", 0.4), "layer 1, auxiliary loss", id="auxiliary"),
        pytest.param(with_option("bias_rate", 0.2), "step 0, layer 1, bias", id="bias"),
        pytest.param(with_step(with_auxiliary=False), "step 0, call 0, x.grad", id="no-auxiliary"),
        pytest.param(with_step(learning_rate=0.38), "step 1, call 0, ", id="rate"),
        pytest.param(with_step(update_biases=False), "step 0, layer 0, bias", id="no-update"),
        pytest.param(
            lambda program: replace(program, average=False), "experts.gate_up[1].grad", id="sum"
        ),
        pytest.param(
            lambda program: replace(program, residual=False), "step 0, call 0, ", id="residual"
        ),
    ],
)
def test_what_the_oracle_notices(
    whole: tuple[Program, list[Record]], change: Callable[[Program], Program], first: str
) -> None:
    """A layer that was told something else than the oracle."""
    program, want = whole
    problems = Ranks().problems(change(program), want)
    assert problems
    assert first in problems[0]


def test_the_oracle_notices_experts_elsewhere(whole: tuple[Program, list[Record]]) -> None:
    program, want = whole
    layers = tuple(replace(one, slots=((0, 1), (2, 3), (4, 5))) for one in program.layers)
    problems = Ranks().problems(replace(program, layers=layers), want)
    assert any("experts.down[0] at the end is missing" in one for one in problems)
    assert any("experts.down[0] at the end is there" in one for one in problems)


def with_other(change: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[[Any], Any]:
    """A dispatch_by_expert that is given other tokens, experts or weights."""

    def broken(real: Any) -> Any:
        def dispatch(buffer: Any, *routed: Any, **options: Any) -> Any:
            *tensors, num_experts = routed
            return real(buffer, *change(*tensors, num_experts), num_experts, **options)

        return dispatch

    return broken


def anywhere(real: Any) -> Any:
    """A dispatch_by_expert that does not know where the caller's weights lie."""

    def dispatch(*routed: Any, place: Any, **options: Any) -> Any:
        del place
        return real(*routed, **options)

    return dispatch


def own_load(real: Any) -> Any:
    return lambda buffer, load: load


@pytest.mark.parametrize(
    "name, broken, first",
    [
        (
            "dispatch_by_expert",
            with_other(lambda x, ids, weights, _: (x, ids, weights * 1.0001)),
            "step 0, call 0, out",
        ),
        (
            "dispatch_by_expert",
            with_other(lambda x, ids, weights, _: (x, ids, weights.detach())),
            "step 0, call 0, x.grad",
        ),
        (
            "dispatch_by_expert",
            with_other(lambda x, ids, weights, _: (x.detach(), ids, weights)),
            "step 0, call 0, x.grad",
        ),
        (
            "dispatch_by_expert",
            with_other(lambda x, ids, weights, num: (x, num - 1 - ids, weights)),
            "step 0, call 0, ",
        ),
        ("sum_over_ranks", own_load, "step 0, call 0, layer 0, auxiliary loss"),
    ],
    ids=["weights", "weights-backward", "rows-backward", "experts", "load"],
)
def test_faults_that_the_oracle_notices(
    whole: tuple[Program, list[Record]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    broken: Callable[[Any], Any],
    first: str,
) -> None:
    """A layer whose parts are wrong."""
    program, want = whole
    monkeypatch.setattr(functional, name, broken(getattr(functional, name)))
    problems = Ranks().problems(program, want)
    assert problems
    assert first in problems[0]


def test_the_moving_program(moving_whole: tuple[Program, list[Record]]) -> None:
    assert Ranks().problems(*moving_whole) == []


@pytest.mark.parametrize(
    "where, name, broken, says",
    [
        (functional, "dispatch_by_expert", anywhere, "DID NOT RAISE|did not match"),
        (training, "sum_replica_gradients", lambda _: lambda _: None, "step 0, layer 0, experts."),
        (moving, "states_by_expert", lambda _: lambda *_: ([], {}), "must match"),
        (scaling, "gather_over_ranks", lambda _: lambda _, x: x[None], "step 2, scale is 2048"),
        (clipping, "gather_over_ranks", lambda _: lambda _, x: x[None], "step 0, norm differs"),
    ],
    ids=["place", "copies", "states", "overflow", "norm"],
)
def test_faults_of_training_that_the_oracle_notices(
    moving_whole: tuple[Program, list[Record]],
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    broken: Callable[..., Any],
    says: str,
) -> None:
    monkeypatch.setattr(where, name, broken(getattr(where, name)))
    assert re.search(says, "\n".join(Ranks().problems(*moving_whole)))


def test_a_program_is_the_same_wherever_it_is_drawn() -> None:
    assert draw(7) == draw(7) != draw(8)
    assert draw(7, 4).num_ranks == 4


def test_frozen_experts_have_no_gradients_to_average() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer = MoE(buffer, 4, 4, RouterConfig(num_experts=2, num_topk=1))
            layer.experts.requires_grad_(False)
            average_expert_gradients(layer)
            layer(torch.ones(3, 4)).sum().backward()
            assert layer.experts.down.grad is None

    run_virtual(job, 1)
