"""What programs are made of: steps as data, which print, replay and cross processes.

Every rank goes through all steps of a program, and does those of the groups that it belongs to. A
result is named by the number of the step that made it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from tests.cases.clock import scaled
from tests.fuzz.routes import Case, Held, LowCase


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What befalls one rank in a step. `oracle` says what may follow.

    bad       it gives bad input (`what`)
    mismatch  it gives input that cannot meet that of the others
    order     it makes a call of the other mode
    event     it gives a previous_event that fails
    thread    a second thread calls the Buffer meanwhile
    stop      its process is stopped for `number` seconds, at a point
    stall     it sleeps for `number` seconds at a point (`what`) that it passes for the nth time
    late      the same, for longer than the others wait
    errno     a system call (`what`) fails with error `number`, when made for the nth time
    raise     an exception comes out of a point
    kill      it dies at a point
    leave     it closes its Buffer instead of calling it
    memory    it gets no memory for rows from the nth time on, for as long as the call lasts
    """

    kind: str
    rank: int  # as its group counts
    what: str = ""
    nth: int = 0
    number: float = 0


@dataclass(frozen=True, kw_only=True)
class Open:
    buffer: int
    members: tuple[int, ...]  # ranks of the world
    transport: str
    nodes: int | tuple[int, ...] | None = None
    low_latency: bool = False
    num_experts: int = 8
    placement: tuple[int, ...] | None = None
    kind: str = "plain"  # its interface: or "elastic", "hybrid"
    balance: float | None = None  # the slack; 0 is "exact"
    held: Held | None = None  # Replicas, in place of a placement
    timeout: float = scaled(40)
    trouble: Trouble | None = None

    @property
    def shares_memory(self) -> bool:
        """Whether all its ranks do."""
        return self.transport in ("direct", "ring")


@dataclass(frozen=True, kw_only=True)
class Close:
    buffer: int
    forget: bool = False  # dropped, not closed


@dataclass(frozen=True, kw_only=True)
class _Call:
    buffer: int
    is_async: bool = False
    after: int | None = None  # the step whose event is previous_event
    around: str = ""  # what holds around it: one of `surroundings.AROUND`
    thread: bool = False  # called on another thread than the rest
    trouble: Trouble | None = None
    probes: int | None = None  # the step of a trouble after which this looks what is left


@dataclass(frozen=True, kw_only=True)
class Dispatch(_Call):
    case: Case
    x_of: int | None = None  # the combine whose sums are dispatched
    peek: bool = False  # read all of the handle at once


@dataclass(frozen=True, kw_only=True)
class Cached(_Call):
    handle: int


@dataclass(frozen=True, kw_only=True)
class Combine(_Call):
    handle: int
    rows: int | str = "own"  # or "buffer" (the Buffer's memory), or the step that received them
    weights: bool = False
    num_biases: int = 0


@dataclass(frozen=True, kw_only=True)
class DispatchByExpert(_Call):
    case: Case


@dataclass(frozen=True, kw_only=True)
class CombineByExpert(_Call):
    handle: int
    rows: str = "own"  # or "buffer" (the Buffer's memory), or "received" (where they arrived)
    weigh: bool = True
    given_out: bool = False


@dataclass(frozen=True, kw_only=True)
class LowDispatch(_Call):
    case: LowCase
    hook: bool = False


@dataclass(frozen=True, kw_only=True)
class LowCombine(_Call):
    handle: int
    hook: bool = False
    zero_copy: bool = False
    given_out: bool = False


@dataclass(frozen=True, kw_only=True)
class Prepare(_Call):
    case: Case  # no later one has more tokens
    by_expert: bool = True


@dataclass(frozen=True, kw_only=True)
class PreparedDispatch(_Call):
    of: int
    case: Case


@dataclass(frozen=True, kw_only=True)
class PreparedCombine(_Call):
    of: int  # the dispatch
    rows: str = "own"  # or "received" (what came, in its memory)
    weigh: bool = True
    given_out: bool = False


@dataclass(frozen=True, kw_only=True)
class Through(_Call):
    """nn.functional: through_experts, or its two parts with what came written over in between."""

    case: Case
    parts: bool = False


@dataclass(frozen=True, kw_only=True)
class Gather(_Call):
    case: Case
    handle: int | None = None  # of an earlier one


@dataclass(frozen=True, kw_only=True)
class GatherBack(_Call):
    handle: int


@dataclass(frozen=True, kw_only=True)
class ElasticDispatch(_Call):
    case: Case
    handle: int | None = None  # of an earlier one, whose case it has
    do_expand: bool = False
    do_cpu_sync: bool = True


@dataclass(frozen=True, kw_only=True)
class ElasticCombine(_Call):
    handle: int
    weights: bool = False
    num_biases: int = 0


@dataclass(frozen=True, kw_only=True)
class HybridDispatch(_Call):
    case: Case
    handle: int | None = None  # of an earlier one, whose case it has
    with_probs: bool = False
    as_lists: bool = False


@dataclass(frozen=True, kw_only=True)
class HybridCombine(_Call):
    handle: int
    with_probs: bool = False


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A handle is used no longer, but a copy of it is. The original dies."""

    of: int
    how: str  # "pickle", "deepcopy" or "tuple"


@dataclass(frozen=True, kw_only=True)
class Scribble:
    """The user writes over what came, which is the user's, and lets go of it."""

    of: int


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Wait for the event, or call the hook, and look at what came."""

    of: int


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Let go of what a step gave, whether it is there or still to come."""

    of: int
    but_handle: bool = False


@dataclass(frozen=True, kw_only=True)
class Move:
    """Experts of a Buffer move to other ranks."""

    buffer: int
    placement: tuple[int, ...] = ()
    held: Held | None = None  # in place of a placement
    refused: bool = False  # by all ranks
    trouble: Trouble | None = None


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A Buffer of another interface, or of experts with copies, from its opening to its end."""

    members: tuple[int, ...]
    kind: str  # of `wholes.KINDS`
    case: Any


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One of the user's, on a group of Buffers."""

    members: tuple[int, ...]
    kind: str
    is_async: bool = False  # until EndCollective


@dataclass(frozen=True, kw_only=True)
class EndCollective:
    of: int


Call = (
    Dispatch
    | Cached
    | Combine
    | DispatchByExpert
    | CombineByExpert
    | LowDispatch
    | LowCombine
    | Prepare
    | PreparedDispatch
    | PreparedCombine
    | Through
    | Gather
    | GatherBack
    | ElasticDispatch
    | ElasticCombine
    | HybridDispatch
    | HybridCombine
)
Step = (
    Open
    | Close
    | Call
    | Finish
    | Drop
    | Copied
    | Scribble
    | Move
    | Whole
    | Collective
    | EndCollective
)

# Those after which a Buffer may be broken: a probe and the end of the Buffer follow.
BREAKING = frozenset({"order", "event", "errno", "raise", "leave", "kill", "late"})


@dataclass(frozen=True, kw_only=True)
class Program:
    seed: int
    num_ranks: int
    without: tuple[str, ...]
    steps: tuple[Any, ...]  # of Step; which kind one is follows from what refers to it
    threads: tuple[int, ...] = ()  # that kernels may take, by rank
    watched: tuple[str, ...] = ()  # "trace", "record"

    def opened(self, buffer: int) -> Open:
        return next(step for step in self.steps if isinstance(step, Open) and step.buffer == buffer)

    @property
    def victim(self) -> int | None:
        """The rank of the world that is killed."""
        for step in self.steps:
            trouble = getattr(step, "trouble", None)
            if trouble is not None and trouble.kind == "kill":
                return self.opened(step.buffer).members[trouble.rank]
        return None

    def __str__(self) -> str:
        head = f"program {self.seed} on {self.num_ranks} processes, threads {self.threads}"
        head = " with ".join([head, *self.watched])
        return "\n".join([head, *(f"{n:4} {show(step)}" for n, step in enumerate(self.steps))])


def show(value: Any) -> str:
    """A dataclass by its name, with the fields that are not as usual."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if not is_dataclass(value):
        return repr(value)
    shown = [
        f"{field.name}={show(getattr(value, field.name))}"
        for field in fields(value)
        if getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"
