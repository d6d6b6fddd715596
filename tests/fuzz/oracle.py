"""What should come of a program: every result, from `spec`, and which errors on which ranks.

`expect` sees all ranks at once. `judge` is given what every rank met, and says what is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.steps import (
    Cached,
    Call,
    Combine,
    Dispatch,
    LowCombine,
    LowDispatch,
    Open,
    Program,
    Trouble,
    show,
)
from tests.transports import exchange_case, low_latency_case
from tokenyard import spec
from tokenyard.testing import Exited, numbered_tokens

# Seconds for a step on a busy machine, well below the Buffers' time limit: nobody waits for that.
SOON = 20.0

Named = dict[str, Any]
Expected = dict[int, list[Named]]  # by step and rank of the group


def combine_rows(case: exchange_case.Case, step: int, rank: int, num_rows: int) -> Tensor:
    """What the experts of a rank made, if not of what it received."""
    first = 5_000_000 + 40_000 * step + 10_000 * rank
    return numbered_tokens(num_rows, case.hidden, first=first, dtype=case.sum_dtype)


def combine_weights(case: exchange_case.Case, step: int, rank: int, num_rows: int) -> Tensor:
    first = 9_000_000 + 40_000 * step + 10_000 * rank
    return numbered_tokens(num_rows, case.num_topk, first=first, dtype=torch.float32)


def combine_biases(case: exchange_case.Case, step: int, rank: int, num_biases: int) -> list[Tensor]:
    return [
        numbered_tokens(
            case.num_tokens(rank), case.hidden, first=10_000 * (rank + 4 * n), dtype=case.sum_dtype
        )
        for n in range(step, step + num_biases)
    ]


def expect(program: Program) -> Expected:
    makers = {
        Dispatch: _dispatch,
        Cached: _cached,
        Combine: _combine,
        LowDispatch: _low_dispatch,
        LowCombine: _low_combine,
    }
    expected: Expected = {}
    for number, step in enumerate(program.steps):
        if type(step) in makers:
            expected[number] = makers[type(step)](program, expected, number, step)
    return expected


def _dispatch(program: Program, known: Expected, number: int, step: Dispatch) -> list[Named]:
    case, ranks = step.case, range(step.case.num_ranks)
    given = [exchange_case.inputs(case, rank, number) for rank in ranks]
    xs = [one.x for one in given]
    if step.x_of is not None:
        xs = [one["x"] for one in known[step.x_of]]
    layouts = [spec.layout(one.topk_idx, case.world) for one in given]
    received = spec.dispatch(
        xs,
        layouts,
        case.world,
        topk_idxs=[one.topk_idx for one in given],
        topk_weights=[one.topk_weights for one in given],
        scales=[one.scales for one in given] if case.dtype == exchange_case.FP8 else None,
        expert_alignment=case.expert_alignment,
    )
    notices = spec.notify(layouts, max(1, case.num_sms // 2)) if step.peek else None
    answers = []
    for rank, got in enumerate(received):
        named: Named = {
            "x": _padded(case, got.x, 0),
            "topk_idx": _padded(case, got.topk_idx, -1),
            "topk_weights": _padded(case, got.topk_weights, 0),
            "src_idx": _padded(case, got.src_idx, -1),
            "per_expert": [] if case.worst else got.num_tokens_per_expert,
        }
        if got.scales is not None:
            named["scales"] = _padded(case, got.scales, 0)
        if notices is not None:
            named["send_head"] = notices[rank].send_head
            for name in ("rank_prefix_matrix", "recv_channel_prefix_matrix"):
                one_node = case.world.num_nodes == 1
                named[name] = getattr(notices[rank], name) if one_node else None
        answers.append(named)
    return answers


def _padded(case: exchange_case.Case, rows: Tensor, mark: int) -> Tensor:
    """With num_worst_tokens rows of zeros, or ids of -1, follow those that were sent."""
    if not case.worst:
        return rows
    shape = case.worst_tokens() - rows.shape[0], *rows.shape[1:]
    return torch.cat([rows, torch.full(shape, mark).to(rows.dtype)])


def _case(program: Program, step: Cached | Combine) -> exchange_case.Case:
    made = program.steps[step.handle]
    assert isinstance(made, Dispatch)
    return made.case


def _layouts(case: exchange_case.Case, number: int) -> list[Any]:
    return [
        spec.layout(exchange_case.inputs(case, rank, number).topk_idx, case.world)
        for rank in range(case.num_ranks)
    ]


def _cached(program: Program, known: Expected, number: int, step: Cached) -> list[Named]:
    case = _case(program, step)
    given = [exchange_case.inputs(case, rank, number) for rank in range(case.num_ranks)]
    fp8 = case.dtype == exchange_case.FP8
    received = spec.dispatch(
        [one.x for one in given],
        _layouts(case, step.handle),
        case.world,
        scales=[one.scales for one in given] if fp8 else None,
    )
    return [
        {"x": _padded(case, one.x, 0), **({"scales": _padded(case, one.scales, 0)} if fp8 else {})}
        for one in received
    ]


def _combine(program: Program, known: Expected, number: int, step: Combine) -> list[Named]:
    case, ranks = _case(program, step), range(_case(program, step).num_ranks)
    rows = [one["x"].shape[0] for one in known[step.handle]]
    layouts = _layouts(case, step.handle)
    ys = [combine_rows(case, number, rank, rows[rank]) for rank in ranks]
    if isinstance(step.rows, int):
        ys = [one["x"] for one in known[step.rows]]
    biases = [combine_biases(case, number, rank, step.num_biases) for rank in ranks]
    sums = spec.combine(ys, layouts, case.world, biases=biases)
    answers: list[Named] = [{"x": one} for one in sums]
    if step.weights:
        given = [combine_weights(case, number, rank, rows[rank]) for rank in ranks]
        for answer, weights in zip(answers, spec.combine(given, layouts, case.world)):
            answer["weights"] = weights
    return answers


def _low_dispatch(program: Program, known: Expected, number: int, step: LowDispatch) -> list[Named]:
    case = step.case
    given = [low_latency_case.inputs(case, rank, number) for rank in range(case.num_ranks)]
    got = spec.low_latency_dispatch(
        [one[0] for one in given],
        [one[1] for one in given],
        case.world,
        case.num_max,
        **case.options,
    )
    return [{"received": one} for one in got]


def _low_combine(program: Program, known: Expected, number: int, step: LowCombine) -> list[Named]:
    made = program.steps[step.handle]
    assert isinstance(made, LowDispatch)
    case, received = made.case, [one["received"] for one in known[step.handle]]
    given = [low_latency_case.inputs(case, rank, step.handle) for rank in range(case.num_ranks)]
    ys = [
        low_latency_case.experts(case, rank, one.x, one.scales, one.count)
        for rank, one in enumerate(received)
    ]
    sums = spec.low_latency_combine(
        ys, [one[1] for one in given], [one[2] for one in given], received, case.world
    )
    return [{"x": one} for one in sums]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a step ended on one rank."""

    kind: str = "ok"  # or the error's class
    text: str = ""
    names: tuple[int, ...] = ()  # the ranks that the error names
    seconds: float = 0.0
    fired: bool = False  # whether the trouble, if it was this rank's, was met

    def __str__(self) -> str:
        return self.kind if not self.text else f"{self.kind}: {self.text}"


@dataclass(kw_only=True)
class Report:
    """What one rank met."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    wrong: dict[int, str] = field(default_factory=dict)  # by step: bytes that are not spec's
    leaks: list[str] = field(default_factory=list)


def judge(program: Program, reports: list[Report | Exited]) -> list[str]:
    """What is wrong, the first step first; nothing, if nothing is."""
    problems = []
    for rank, report in enumerate(reports):
        if isinstance(report, Exited):
            if rank != program.victim or report.exitcode != -9:
                problems.append(f"rank {rank}'s process ended with exit code {report.exitcode}")
        elif rank == program.victim:
            problems.append(f"rank {rank} was to be killed, and lives")
    for number, step in enumerate(program.steps):
        reported = {
            rank: report for rank, report in enumerate(reports) if isinstance(report, Report)
        }
        outs = {
            rank: one.outcomes[number] for rank, one in reported.items() if number in one.outcomes
        }
        said = [
            f"rank {rank}: {one.wrong[number]}"
            for rank, one in reported.items()
            if number in one.wrong
        ]
        said += _judge_step(program, number, outs)
        problems += [f"step {number}, {show(step)}: {one}" for one in said]
    for rank, report in enumerate(reports):
        if isinstance(report, Report):
            problems += [f"leak on rank {rank}: {one}" for one in report.leaks]
    return problems


def _judge_step(program: Program, number: int, outs: dict[int, Outcome]) -> list[str]:
    step = program.steps[number]
    trouble: Trouble | None = getattr(step, "trouble", None)
    probes = getattr(step, "probes", None)
    said = [
        f"rank {rank} took {one.seconds:.1f} s: {one}"
        for rank, one in outs.items()
        if one.seconds > SOON
    ]
    if probes is not None:
        return said + _judge_probe(program, number, outs)
    if trouble is None:
        return said + [f"rank {rank}: {one}" for rank, one in outs.items() if one.kind != "ok"]
    members = program.opened(step.buffer).members
    culprit = members[trouble.rank]
    fired = outs[culprit].fired if culprit in outs else True
    for rank, one in outs.items():
        own = rank == culprit
        allowed = _allowed(step, trouble, own, fired)
        named = not one.names or one.kind == "ok" or one.names == (trouble.rank,) or own
        if one.kind not in allowed or not named:
            whose = "the culprit" if own else f"culprit {trouble.rank} of {members}"
            said.append(f"rank {rank} ({whose}): {one}; want {' or '.join(sorted(allowed))}")
    return said


def _allowed(step: Open | Call, trouble: Trouble, own: bool, fired: bool) -> set[str]:
    """Kinds of outcome. Where an error names ranks, they must be the culprit alone."""
    kind = trouble.kind
    if kind in ("stall", "thread"):
        return {"ok"}
    if kind == "bad":
        return {"ValueError"} if own else {"PeerInputError"}
    if kind in ("mismatch", "order"):
        return {"CallMismatch"}
    if kind == "event":
        return {"Injected"} if own else {"PeerInputError", "PeerLeft"}
    if kind == "leave":
        return {"left"} if own else {"PeerLeft"}
    if kind == "kill":
        return {"ok", "PeerDied"}
    if not fired:
        return {"ok"}
    if kind == "raise":
        return {"Interrupted", "Injected"} if own else {"ok", "PeerLeft", "PeerInputError"}
    if kind == "late":  # whoever wakes up late finds the others gone
        return {"ok", "PeerLeft", "PeerTimeout"} if own else {"ok", "PeerTimeout"}
    assert kind == "errno"
    if isinstance(step, Open):
        errors = {"ok", "SharedMemoryError", "ValueError"}
        return errors if own else errors | {"PeerInputError", "PeerLeft"}
    low = isinstance(step, (LowDispatch, LowCombine))
    return (
        {"ok", "SharedMemoryError"}
        | (set() if own else {"PeerLeft"})
        | ({"PeerInputError"} if low and not own else set())
    )


def _judge_probe(program: Program, number: int, outs: dict[int, Outcome]) -> list[str]:
    """After a trouble all ranks go on, or none: those that were told before say so again, and the
    others are told of the culprit, or, after a death, of the dead.
    """
    step = program.steps[number]
    cause = program.steps[step.probes]
    members, trouble = program.opened(step.buffer).members, cause.trouble
    culprit = program.opened(cause.buffer).members[trouble.rank]
    named = (members.index(culprit),)
    kinds = {one.kind for one in outs.values()}
    if kinds <= {"ok"} and trouble.kind not in ("kill", "leave"):
        return []
    said = []
    for rank, one in outs.items():
        allowed = {"BufferClosed", "PeerDied" if trouble.kind == "kill" else "PeerLeft"}
        # Who has seen that a rank is late, or gave up, has given up as well.
        right = one.names in ((), named) or trouble.kind == "late" or rank == culprit
        if one.kind not in allowed or not right:
            said.append(f"rank {rank}: {one}; want {' or '.join(sorted(allowed))} of {named}")
    return said
