"""Which errors a program may meet on which ranks: `judge` is given what each of them met."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.cases.clock import scaled
from tests.fuzz import wholes
from tests.fuzz.steps import (
    Call,
    CombineByExpert,
    LowCombine,
    LowDispatch,
    Move,
    Open,
    Program,
    Trouble,
    Whole,
    show,
)
from tokenyard.testing import Exited

# Seconds for a step on a busy machine, well below the Buffers' time limit: nobody waits for that.
SOON = scaled(20)


# Points that a rank may pass before it has told anybody of a call.
_UNTOLD = ("Agreement.meet", "Pool.take")


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
    said: list[str] = field(default_factory=list)  # by what watched the rank
    outs: dict[int, bytes] = field(default_factory=dict)  # of `Whole` steps, as torch saves them


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
        if isinstance(step, Whole):
            found = [reported[one].outs.get(number) for one in step.members if one in reported]
            if None not in found and len(found) == len(step.members):
                said += wholes.problems(step, found)
        problems += [f"step {number}, {show(step)}: {one}" for one in said]
    for rank, report in enumerate(reports):
        if isinstance(report, Report):
            problems += [f"leak on rank {rank}: {one}" for one in report.leaks]
            problems += [f"rank {rank} was not watched: {one}" for one in report.said]
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
    if isinstance(step, Move) and step.refused:
        return said + [f"rank {r}: {o}" for r, o in outs.items() if o.kind != "ValueError"]
    if trouble is None:
        return said + [f"rank {rank}: {one}" for rank, one in outs.items() if one.kind != "ok"]
    members = program.opened(step.buffer).members
    culprit = members[trouble.rank]
    fired = outs[culprit].fired if culprit in outs else True
    if trouble.kind == "memory" and len({one.kind == "ok" for one in outs.values()}) > 1:
        said.append("some ranks went on: " + str({rank: str(one) for rank, one in outs.items()}))
    for rank, one in outs.items():
        own = rank == culprit
        allowed = _allowed(step, trouble, own, fired, program.opened(step.buffer).shares_memory)
        named = not one.names or one.kind == "ok" or one.names == (trouble.rank,) or own
        # The culprit of a wrong order has waited for the others.
        named = named or trouble.kind == "order"
        if one.kind not in allowed or not named:
            whose = "the culprit" if own else f"culprit {trouble.rank} of {members}"
            said.append(f"rank {rank} ({whose}): {one}; want {' or '.join(sorted(allowed))}")
    return said


def _allowed(
    step: Open | Call, trouble: Trouble, own: bool, fired: bool, shares_memory: bool
) -> set[str]:
    """Kinds of outcome. Where an error names ranks, they must be the culprit alone."""
    kind = trouble.kind
    if kind in ("stall", "stop", "thread"):
        return {"ok"}
    if kind == "bad":
        return {"ValueError"} if own else {"PeerInputError"}
    if kind == "mismatch":
        return {"CallMismatch"}
    if kind == "order":  # unless the other call could not be made at all
        # Ranks that share memory do not hear of a call of the other kind, and wait in vain.
        waits = {"PeerTimeout", "PeerLeft"} if shares_memory else set()
        return {"CallMismatch", "ValueError" if own else "PeerInputError"} | waits
    if kind == "event":
        return {"Injected"} if own else {"PeerInputError", "PeerLeft"}
    if kind == "leave":
        return {"left"} if own else {"PeerLeft"}
    if kind == "kill":
        return {"ok", "PeerDied"}
    if not fired:
        return {"ok"}
    if kind == "memory":
        return {"ok", "SharedMemoryError"} | (set() if own else {"PeerInputError"})
    if kind == "raise":
        if own:
            return {"Interrupted", "Injected"}
        # Before it has told anybody of a call, a rank has only left that call out.
        skipped = {"CallMismatch"} if trouble.what in _UNTOLD else set()
        return {"ok", "PeerLeft", "PeerInputError"} | skipped
    if kind == "late":  # whoever wakes up late finds the others gone
        return {"ok", "PeerLeft", "PeerTimeout"} if own else {"ok", "PeerTimeout"}
    assert kind == "errno"
    if isinstance(step, Open):
        errors = {"ok", "SharedMemoryError", "ValueError", "OSError"}
        return errors if own else errors | {"PeerInputError", "PeerLeft"}
    # These need memory before a rank tells the others of the call.
    early = isinstance(step, (LowDispatch, LowCombine, CombineByExpert))
    return (
        {"ok", "SharedMemoryError"}
        | (set() if own else {"PeerLeft"})
        | ({"PeerInputError"} if early and not own else set())
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
        if trouble.kind in ("late", "order"):  # on whom the others have given up
            allowed.add("PeerTimeout")
        # Whoever did not come to tell of its call may be here a call early.
        if trouble.kind == "order" or (trouble.kind == "raise" and trouble.what in _UNTOLD):
            allowed.add("CallMismatch")
        # Who has seen that a rank is late, or gave up, has given up as well.
        right = one.names in ((), named) or trouble.kind in ("late", "order") or rank == culprit
        if one.kind not in allowed or not right:
            said.append(f"rank {rank}: {one}; want {' or '.join(sorted(allowed))} of {named}")
    return said
