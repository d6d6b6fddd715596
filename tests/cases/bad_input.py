"""Bad input by name: what one rank does wrong, and what every rank is told.

In each case CULPRIT calls `wrong` while the other ranks call `right`. Three things can follow:

    rejected  the culprit's own input is bad: ValueError there, PeerInputError on the others
    differ    every call is legal, but they cannot meet: CallMismatch on all ranks
    local     the call concerns one rank only: ValueError there, nothing on the others
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.cases.clock import scaled
from tests.cases.inside import forget_a_call
from tokenyard import (
    Buffer,
    CallMismatch,
    Config,
    Handle,
    PeerInputError,
    kernels,
    spec,
    transports,
)
from tokenyard.testing import numbered_tokens, routing

NUM_RANKS, NUM_EXPERTS, NUM_TOPK, HIDDEN = 3, 6, 2, 8
TOKENS = (5, 4, 6)  # by rank
CULPRIT = 1
WORLD = spec.World.even(NUM_EXPERTS, NUM_RANKS)

Step = Callable[["Scene"], Any]
Change = Callable[["Scene"], dict[str, Any]]  # the arguments that are not the good ones
Told = tuple[type[Exception], str] | None  # type and text of the error, None where there is none
# By argument and kind: its value, or how a Scene makes it, and the text that follows its name.
Table = dict[str, dict[str, tuple[Any, str]]]


def good_input(rank: int, *, seed: int = 0) -> dict[str, Any]:
    x = numbered_tokens(TOKENS[rank], HIDDEN, first=sum(TOKENS[:rank]))
    topk_idx, weights = routing("uniform", TOKENS[rank], NUM_TOPK, NUM_EXPERTS, seed=seed + rank)
    return {"x": x, "topk_idx": topk_idx, "topk_weights": weights}


def num_sent(source: int) -> list[int]:
    return spec.layout(good_input(source)["topk_idx"], WORLD).num_tokens_per_rank.tolist()


def new_buffer(group: Any, **options: Any) -> Buffer:
    return Buffer(group, **{"timeout": scaled(60), **options})


class Scene:
    """One rank before its call: a Buffer, good input, and the handles of two dispatches."""

    def __init__(self, group: Any, **options: Any) -> None:
        self.group, self.rank = group, group.rank()
        self.buffer = new_buffer(group, **options)
        self.good = good_input(self.rank)
        self.x, self.topk_idx, self.topk_weights = self.good.values()
        self.y, _, self.recv_weights, _, self.handle, _ = self.dispatch()
        self.later = self.dispatch(**good_input(self.rank, seed=10)).handle
        self.foreign: Handle | None = None

    def dispatch(self, **changes: Any) -> Any:
        return self.buffer.dispatch(**{**self.good, "num_experts": NUM_EXPERTS, **changes})

    def cached(self, **changes: Any) -> Any:
        return self.buffer.dispatch(**{"x": self.x, "handle": self.handle, **changes})

    def combine(self, **changes: Any) -> Any:
        return self.buffer.combine(**{"x": self.y, "handle": self.handle, **changes})

    def open(self, **changes: Any) -> None:
        new_buffer(self.group, **changes).close()

    def layout(self, **changes: Any) -> dict[str, Any]:
        """The arguments of dispatch that make up a layout."""
        parts = spec.layout(self.topk_idx, WORLD)._asdict()
        del parts["num_tokens_per_node"]
        return {**parts, **changes}

    def visit(self, *, close: bool) -> None:
        """Take a handle home from a Buffer with another placement."""
        elsewhere = new_buffer(self.group, placement=torch.arange(NUM_EXPERTS) % NUM_RANKS)
        self.foreign = elsewhere.dispatch(**self.good, num_experts=NUM_EXPERTS).handle
        if close:
            elsewhere.close()


@dataclass(frozen=True, kw_only=True)
class Case:
    wrong: Step
    right: Step
    told: Callable[[int], Told]  # by rank
    before: Step = lambda _: None  # what all ranks do first
    options: dict[str, Any] = field(default_factory=dict)  # of the Buffer


Cases = dict[str, Case]

UNSHOWN = ("one", "another")  # what differs is a number that means nothing to a reader

CALLS: dict[str, Callable[..., Any]] = {
    "dispatch": Scene.dispatch,
    "cached dispatch": Scene.cached,
    "combine": Scene.combine,
    "Buffer": Scene.open,
}


def nothing(_: Scene) -> dict[str, Any]:
    return {}


def rejected(stage: str, change: Change, text: str, **more: Any) -> Case:
    own = f"{stage}: {text}, on rank {CULPRIT}"

    def told(rank: int) -> Told:
        if rank == CULPRIT:
            return ValueError, own
        return PeerInputError, f"rank {CULPRIT} rejected its input, so no rank went on: {own}"

    call = CALLS[stage]
    return Case(wrong=lambda s: call(s, **change(s)), right=call, told=told, **more)


def mismatch(what: str, got: tuple[Any, Any], stages: tuple[str, str]) -> Callable[[int], Told]:
    """What ranks are told. Pairs are (the culprit's, the others')."""

    def told(rank: int) -> Told:
        mine, theirs = got if rank == CULPRIT or got == UNSHOWN else got[::-1]
        other = 0 if rank == CULPRIT else CULPRIT
        shown = f"{mine} on rank {rank}, {theirs} on rank {other}"
        return CallMismatch, f"{stages[rank != CULPRIT]}: ranks differ in {what}: {shown}"

    return told


def differ(
    stage: str, what: str, got: tuple[Any, Any], wrong: Change, right: Change = nothing
) -> Case:
    """The same call with other arguments."""
    call = CALLS[stage]
    return Case(
        wrong=lambda s: call(s, **wrong(s)),
        right=lambda s: call(s, **right(s)),
        told=mismatch(what, got, (stage, stage)),
    )


def meets(mine: str, theirs: str) -> Case:
    """The culprit calls one thing, the others another."""
    told = mismatch("what they call", (mine, theirs), (mine, theirs))
    return Case(wrong=CALLS[mine], right=CALLS[theirs], told=told)


def one_behind(scene: Scene) -> Any:
    """Dispatch as a rank that has forgotten a call. No legal calls lead there, only being
    interrupted in the middle of one, so the count itself is set back.
    """
    forget_a_call(scene.buffer)
    return scene.dispatch()


def local(wrong: Step, text: str) -> Case:
    def told(rank: int) -> Told:
        return (ValueError, text) if rank == CULPRIT else None

    return Case(wrong=wrong, right=lambda _: None, told=told)


def one_by_one(stage: str, table: Table, *, beside: Change = nothing) -> Cases:
    """A case for each value of each argument; `beside` it go the arguments that it needs."""

    def case(argument: str, value: Any, text: str) -> Case:
        def change(scene: Scene) -> dict[str, Any]:
            bad = value(scene) if callable(value) else value
            return {**beside(scene), argument: bad}

        return rejected(stage, change, argument + text)

    return {
        f"{stage}-{argument}-{kind}".replace(" ", "-"): case(argument, value, text)
        for argument, kinds in table.items()
        for kind, (value, text) in kinds.items()
    }


def with_expert(scene: Scene, expert: int) -> Tensor:
    topk_idx = scene.topk_idx.clone()
    topk_idx[3, 1] = expert
    return topk_idx


ANY = "float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, uint8"
SUMS = "float64, float32, float16, bfloat16"
ALONE = "is given alone, want topk_idx and topk_weights together or neither"
PARTS = "num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert"
TOGETHER = f"want {PARTS} together, or none of them and num_experts"
NO_LAYOUT = (
    "no layout is given, want num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert, "
    "or topk_idx and num_experts"
)
OUTSIDE = "want -1..5 (num_experts=6)"
FOREIGN = (
    "handle is of dispatch call 0 of another rank, or of a Buffer with another group, placement, "
    "transport or nodes, want one of a Buffer like this one, returned here"
)
ROUTED = "given with a handle, which has the routing already"
COUNTED = f"want {num_sent(CULPRIT)}, the columns of is_token_in_rank added up"
MOST = 2**31 - 1
NUM_ARRIVE = sum(num_sent(source)[CULPRIT] for source in range(NUM_RANKS))
SHORT = NUM_ARRIVE - 1


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


CONFIG = {
    "dict": ({"num_sms": 20}, " is a dict, want a tokenyard.Config"),
    "odd-sms": (Config(7), ".num_sms is 7, want an even number"),
    "no-sms": (Config(0), ".num_sms is 0, want at least 2"),
    "text-sms": (Config("20"), ".num_sms is '20', want an integer"),  # type: ignore[arg-type]
    "huge-sms": (Config(2**40), f".num_sms is {2**40}, want at most 4096"),
    "no-chunk": (Config(20, 0), ".num_max_nvl_chunked_send_tokens is 0, want at least 1"),
    "nvl-send-not-below-recv": (
        Config(20, 256, 256),
        ".num_max_nvl_chunked_send_tokens is 256, want less than "
        "num_max_nvl_chunked_recv_tokens (256)",
    ),
    "rdma-send-not-below-recv": (
        Config(20, 6, 256, 6, 5),
        ".num_max_rdma_chunked_send_tokens is 6, want less than "
        "num_max_rdma_chunked_recv_tokens (5)",
    ),
}

DISPATCH: Table = {
    "x": {
        "none": (None, " is None, want a torch.Tensor"),
        "list": ([[1.0]], " is a list, want a torch.Tensor"),
        "1d": (lambda s: s.x[0], " has shape [8], want [tokens, hidden]"),
        "3d": (lambda s: s.x[None], " has shape [1, 4, 8], want [tokens, hidden]"),
        "hidden-0": (lambda s: s.x[:, :0], " has hidden size 0, want at least 1"),
        "int64": (lambda s: s.x.long(), f" has dtype int64, want {ANY}"),
        "bool": (lambda s: s.x > 0, f" has dtype bool, want {ANY}"),
        "complex": (lambda s: s.x.cfloat(), f" has dtype complex64, want {ANY}"),
        "meta": (lambda s: s.x.to("meta"), " is on device meta, want cpu"),
        "sparse": (lambda s: s.x.to_sparse(), " has layout torch.sparse_coo, want torch.strided"),
        "tuple-of-1": (lambda s: (s.x,), " is a tuple of 1, want a tensor or (x, scales)"),
        "tuple-of-3": (lambda s: (s.x,) * 3, " is a tuple of 3, want a tensor or (x, scales)"),
        "1d-with-scales": (
            lambda s: (s.x[0], torch.ones(4, 1)),
            "[0] has shape [8], want [tokens, hidden]",
        ),
        "scales-none": (lambda s: (s.x, None), "[1] (scales) is None, want a torch.Tensor"),
        "scales-rows": (
            lambda s: (s.x, torch.ones(3, 1)),
            "[1] (scales) has shape [3, 1], want [4, scales]",
        ),
        "scales-1d": (
            lambda s: (s.x, torch.ones(4)),
            "[1] (scales) has shape [4], want [4, scales]",
        ),
        "scales-bfloat16": (
            lambda s: (s.x, torch.ones(4, 1).bfloat16()),
            "[1] (scales) has dtype bfloat16, want float32, int32",
        ),
        "scales-no-columns": (
            lambda s: (s.x, torch.ones(4, 0)),
            "[1] (scales) has no columns, want at least 1 a row",
        ),
    },
    "topk_idx": {
        "list": ([[0, 1]], " is a list, want a torch.Tensor"),
        "int32": (lambda s: s.topk_idx.int(), " has dtype int32, want int64"),
        "1d": (lambda s: s.topk_idx[:, 0], " has shape [4], want [4, topk]"),
        "one-token-short": (lambda s: s.topk_idx[1:], " has shape [3, 2], want [4, topk]"),
        "topk-0": (lambda s: s.topk_idx[:, :0], " has top-k 0, want at least 1"),
        "meta": (lambda s: s.topk_idx.to("meta"), " is on device meta, want cpu"),
        "sparse": (
            lambda s: s.topk_idx.to_sparse(),
            " has layout torch.sparse_coo, want torch.strided",
        ),
        "one-past-the-end": (lambda s: with_expert(s, 6), f"[3, 1] is 6, {OUTSIDE}"),
        "minus-2": (lambda s: with_expert(s, -2), f"[3, 1] is -2, {OUTSIDE}"),
        "huge": (lambda s: with_expert(s, 2**62), f"[3, 1] is {2**62}, {OUTSIDE}"),
    },
    "topk_weights": {
        "list": ([[0.5, 0.5]], " is a list, want a torch.Tensor"),
        "float64": (lambda s: s.topk_weights.double(), " has dtype float64, want float32"),
        "other-topk": (lambda s: s.topk_weights[:, :1], " has shape [4, 1], want [4, 2]"),
        "one-token-short": (lambda s: s.topk_weights[1:], " has shape [3, 2], want [4, 2]"),
    },
    "num_experts": {
        "0": (0, " is 0, want at least 1"),
        "negative": (-6, " is -6, want at least 1"),
        "float": (6.0, " is 6.0, want an integer"),
        "bool": (True, " is True, want an integer"),
        "huge": (10**12, " is 1000000000000, want at most 1048576"),
    },
    "expert_alignment": {
        "0": (0, " is 0, want at least 1"),
        "float": (1.5, " is 1.5, want an integer"),
        "huge": (2**70, f" is {2**70}, want at most {MOST}"),
    },
    "num_worst_tokens": {
        "negative": (-1, " is -1, want at least 0"),
        "one-too-small": (SHORT, f" is {SHORT}, want at least the {NUM_ARRIVE} that arrive"),
        "huge": (2**70, f" is {2**70}, want at most {MOST}"),
    },
    "config": CONFIG,
}

# Each beside the other parts of a good layout.
LAYOUT: Table = {
    "num_tokens_per_rank": {
        "missing": (None, f" is None, {TOGETHER}"),
        "list": ([4, 4, 4], " is a list, want a torch.Tensor"),
        "int64": (ints(0, 0, 0).long(), " has dtype int64, want int32"),
        "of-4-ranks": (ints(0, 0, 0, 0), " has shape [4], want [3]"),
        "other-counts": (ints(9, 9, 9), f" is [9, 9, 9], {COUNTED}"),
    },
    "is_token_in_rank": {
        "missing": (None, f" is None, {TOGETHER}"),
        "uint8": (torch.ones(4, 3, dtype=torch.uint8), " has dtype uint8, want bool"),
        "transposed": (torch.ones(3, 4) > 0, " has shape [3, 4], want [4, 3]"),
        "of-other-tokens": (torch.ones(5, 3) > 0, " has shape [5, 3], want [4, 3]"),
    },
    "num_tokens_per_expert": {
        "missing": (None, f" is None, {TOGETHER}"),
        "int64": (ints(0, 0, 0).long(), " has dtype int64, want int32"),
        "2d": (ints(0, 0, 0)[None], " has shape [1, 3], want [experts]"),
        "empty": (ints(), " is empty, want at least one expert"),
        "negative": (ints(1, 2, -3), "[2] is -3, want at least 0"),
    },
    "num_experts": {
        "not-the-layout's": (7, " is 7, want 6, the length of num_tokens_per_expert"),
    },
    "topk_idx": {
        "one-past-the-layout": (lambda s: with_expert(s, 6), f"[3, 1] is 6, {OUTSIDE}"),
    },
}

HANDLE = {
    "int": (0, " is an int, want the handle that dispatch returned"),
    "tuple": (
        lambda s: tuple(s.handle)[1:],
        " is a tuple, want the handle that dispatch returned, or all its fields as they came out "
        "of it: its first tensor is of no handle that is still alive",
    ),
}

CACHED: Table = {
    "handle": HANDLE,
    "x": {
        **{kind: DISPATCH["x"][kind] for kind in ("none", "1d", "int64", "scales-rows")},
        "one-token-more": (torch.ones(5, 8), " has 5 tokens, want 4, those of the handle"),
    },
    "topk_idx": {"beside": (lambda s: s.topk_idx, f" {ROUTED}")},
    "num_experts": {"beside": (6, f" {ROUTED}")},
}

COMBINE: Table = {
    "handle": {
        **HANDLE,
        "none": (None, " is None, want the handle that dispatch returned"),
    },
    "x": {
        "none": (None, " is None, want a torch.Tensor"),
        "tuple": (lambda s: (s.y, s.y), " is a tuple, want a torch.Tensor"),
        "1d": (lambda s: s.y[0], f" has shape [8], want [{NUM_ARRIVE}, hidden]"),
        "one-row-short": (
            lambda s: s.y[1:],
            f" has shape [{SHORT}, 8], want [{NUM_ARRIVE}, hidden]",
        ),
        "hidden-0": (lambda s: s.y[:, :0], " has hidden size 0, want at least 1"),
        "fp8": (
            lambda s: s.y.to(torch.float8_e4m3fn),
            f" has dtype float8_e4m3fn, want {SUMS}",
        ),
        "int8": (lambda s: s.y.to(torch.int8), f" has dtype int8, want {SUMS}"),
        "meta": (lambda s: s.y.to("meta"), " is on device meta, want cpu"),
    },
    "topk_weights": {
        "one-row-short": (
            lambda s: s.recv_weights[1:],
            f" has shape [{SHORT}, 2], want [{NUM_ARRIVE}, topk]",
        ),
        "1d": (
            lambda s: s.recv_weights[:, 0],
            f" has shape [{NUM_ARRIVE}], want [{NUM_ARRIVE}, topk]",
        ),
        "no-columns": (lambda s: s.recv_weights[:, :0], " has top-k 0, want at least 1"),
        "float64": (lambda s: s.recv_weights.double(), " has dtype float64, want float32"),
    },
    "bias": {
        "list": (lambda s: [s.x, s.x], " is a list, want a torch.Tensor"),
        "one-token-short": (lambda s: s.x[1:], " has shape [3, 8], want [4, 8]"),
        "other-hidden": (lambda s: s.x[:, :4], " has shape [4, 4], want [4, 8]"),
        "float32": (lambda s: s.x.float(), " has dtype float32, want bfloat16"),
        "tuple-of-3": (lambda s: (s.x,) * 3, " is a tuple of 3, want at most 2 tensors"),
        "second-1d": (lambda s: (s.x, s.x[0]), "[1] has shape [8], want [4, 8]"),
    },
    "out": {
        "list": ([0.0], " is a list, want a torch.Tensor"),
        "one-token-short": (lambda s: s.x[1:], " has shape [3, 8], want [4, 8]"),
        "float32": (lambda s: s.x.float(), " has dtype float32, want bfloat16"),
        "meta": (lambda s: s.x.to("meta"), " is on device meta, want cpu"),
        "strided": (lambda s: s.x.t().contiguous().t(), " is not contiguous, want it so"),
        "expanded": (lambda s: s.x[:1].expand(4, 8), " is not contiguous, want it so"),
        "of-x": (
            lambda s: s.y[-4:],
            " shares memory with what is to be summed, want memory of its own",
        ),
    },
    "config": CONFIG,
}

SWITCHES = ("low_latency_mode", "enable_shrink")
OPEN: Table = {
    "timeout": {
        "0": (0, " is 0, want seconds above 0, at most 1e6"),
        "inf": (float("inf"), " is inf, want seconds above 0, at most 1e6"),
        "nan": (float("nan"), " is nan, want seconds above 0, at most 1e6"),
        "text": ("5", " is '5', want seconds above 0, at most 1e6"),
        "bool": (True, " is True, want seconds above 0, at most 1e6"),
    },
    **{
        size: {
            "text": ("1", " is '1', want an integer"),
            "none": (None, " is None, want an integer"),
            "negative": (-1, " is -1, want at least 0"),
        }
        for size in ("num_nvl_bytes", "num_rdma_bytes")
    },
    **{
        switch: {
            "text": ("yes", " is 'yes', want True or False"),
            "none": (None, " is None, want True or False"),
        }
        for switch in SWITCHES
    },
    "ranks_per_node": {
        "0": (0, " is 0, want at least 1"),
        "float": (2.0, " is 2.0, want an integer"),
        "empty-node": ([3, 0], "[1] is 0, want at least 1"),
        "too-few": ([1, 1], " is [1, 1], 2 ranks in all, want 3"),
        "more-than-there-are": (4, " is 4, want at most 3, the ranks of the group"),
    },
    "placement": {
        "list": ([0, 1, 2], " is a list, want a torch.Tensor"),
        "float": (torch.zeros(6), " has dtype float32, want int32, int64"),
        "2d": (ints(0, 1, 2)[None], " has shape [1, 3], want [experts]"),
        "empty": (ints(), " is empty, want the rank of at least one expert"),
        "one-past-the-ranks": (ints(0, 1, 2, 3), "[3] is 3, want a rank, 0..2"),
        "negative": (ints(0, -1, 2), "[1] is -1, want a rank, 0..2"),
    },
}

# What is more than one argument, or whose message begins otherwise.
OTHERS: Cases = {
    **{
        f"{stage}-previous_event-text".replace(" ", "-"): rejected(
            stage,
            lambda s: {"previous_event": "soon"},
            "previous_event is a str, want an EventOverlap",
        )
        for stage in ("dispatch", "cached dispatch", "combine")
    },
    **{
        f"{stage}-handle-of-another-rank".replace(" ", "-"): rejected(
            stage,
            lambda s: {"handle": replace(s.handle, origin=s.handle.origin._replace(rank=9))},
            FOREIGN,
        )
        for stage in ("cached dispatch", "combine")
    },
    "topk_idx-alone": rejected("dispatch", lambda s: {"topk_weights": None}, f"topk_idx {ALONE}"),
    "topk_weights-alone": rejected(
        "dispatch", lambda s: {"topk_idx": None}, f"topk_weights {ALONE}"
    ),
    "num_experts-missing": rejected("dispatch", lambda s: {"num_experts": None}, NO_LAYOUT),
    "routing-missing": rejected(
        "dispatch", lambda s: {"topk_idx": None, "topk_weights": None}, NO_LAYOUT
    ),
    "layout-of-ranks-alone": rejected(
        "dispatch",
        lambda s: s.layout(is_token_in_rank=None, num_tokens_per_expert=None),
        f"is_token_in_rank and num_tokens_per_expert are None, {TOGETHER}",
    ),
    "num_experts-not-the-placement's": rejected(
        "dispatch",
        lambda s: {"num_experts": 7},
        "num_experts is 7, want 6, the length of placement=",
        options={"placement": torch.tensor(WORLD.rank_of_expert)},
    ),
    "cached-dispatch-layout-beside": rejected("cached dispatch", Scene.layout, f"{PARTS} {ROUTED}"),
    "transport-unknown": rejected(
        "Buffer",
        lambda s: {"transport": "rnig"},
        f"unknown transport 'rnig'; available: auto, {', '.join(transports.available())}",
    ),
    "kernels-unknown": rejected(
        "Buffer",
        lambda s: {"kernels": "cobol"},
        f"unknown kernel set 'cobol'; available: auto, {', '.join(kernels.available())}",
    ),
    **{
        f"kernels-{kind}": rejected(
            "Buffer",
            partial(lambda value, s: {"kernels": value}, value),
            f"kernels is {what}, want a name: auto, {', '.join(kernels.available())}",
        )
        for kind, value, what in (("int", 1, "an int"), ("list", ["numba"], "a list"))
    },
    "transport-none": rejected(
        "Buffer",
        lambda s: {"transport": None},
        f"unknown transport None; available: auto, {', '.join(transports.available())}",
    ),
    **{
        f"{stage}-handle-{kind}".replace(" ", "-"): rejected(
            stage,
            lambda s: {"handle": s.foreign},
            FOREIGN,
            before=lambda s, close=close: s.visit(close=close),
        )
        for stage in ("cached dispatch", "combine")
        for kind, close in (("of-another-buffer", False), ("stale", True))
    },
}


SCALES = "scales a row"
MADE_BY = "the handle (by the number of the call that made it)"
GIVEN = "transport=, ring memory, ranks_per_node=, placement=, balance= or low-latency mode"
DIFFER: Cases = {
    "hidden": differ("dispatch", "hidden size", (4, 8), lambda s: {"x": s.x[:, :4]}),
    "dtype": differ(
        "dispatch", "dtype of x", ("float32", "bfloat16"), lambda s: {"x": s.x.float()}
    ),
    "num_experts": differ("dispatch", "num_experts", (7, 6), lambda s: {"num_experts": 7}),
    "topk": differ(
        "dispatch",
        "top-k",
        (1, 2),
        lambda s: {"topk_idx": s.topk_idx[:, :1], "topk_weights": s.topk_weights[:, :1]},
    ),
    "topk-not-on-one": differ(
        "dispatch",
        "top-k",
        ("none", 2),
        lambda s: s.layout(topk_idx=None, topk_weights=None),
    ),
    "scales-on-one": differ(
        "dispatch", SCALES, (1, "none"), lambda s: {"x": (s.x, torch.ones(4, 1))}
    ),
    "scales": differ(
        "dispatch",
        SCALES,
        (2, 1),
        lambda s: {"x": (s.x, torch.ones(len(s.x), 2))},
        lambda s: {"x": (s.x, torch.ones(len(s.x), 1))},
    ),
    "scales-dtype": differ(
        "dispatch",
        "dtype of the scales",
        ("int32", "float32"),
        lambda s: {"x": (s.x, torch.ones(len(s.x), 1).int())},
        lambda s: {"x": (s.x, torch.ones(len(s.x), 1))},
    ),
    **{
        f"{what}-{stage}".replace(" ", "-"): differ(
            stage, words, got, partial(lambda config, s: {"config": config}, config)
        )
        for stage in ("dispatch", "cached dispatch", "combine")
        for what, words, got, config in (
            ("channels", "channels (config.num_sms // 2)", (2, 10), Config(4)),
            ("slots", "config.num_max_nvl_chunked_recv_tokens", (9, 256), Config(20, 6, 9)),
        )
    },
    "combine-meets-dispatch": meets("combine", "dispatch"),
    "dispatch-meets-combine": meets("dispatch", "combine"),
    "cached-dispatch-meets-dispatch": meets("cached dispatch", "dispatch"),
    "cached-dispatch-meets-combine": meets("cached dispatch", "combine"),
    "one-call-behind": Case(
        wrong=one_behind,
        right=Scene.dispatch,
        told=mismatch("how many calls they made on this Buffer", (1, 2), ("dispatch", "dispatch")),
    ),
    "cached-dispatch-handle": differ(
        "cached dispatch", MADE_BY, (1, 0), lambda s: {"handle": s.later}
    ),
    "cached-dispatch-hidden": differ(
        "cached dispatch", "hidden size", (4, 8), lambda s: {"x": s.x[:, :4]}
    ),
    "combine-handle": differ(
        "combine",
        MADE_BY,
        (1, 0),
        lambda s: {"handle": s.later, "x": s.y.new_zeros(s.later.flow.num_rows, 8)},
    ),
    "combine-hidden": differ("combine", "hidden size", (4, 8), lambda s: {"x": s.y[:, :4]}),
    "combine-dtype": differ(
        "combine", "dtype of x", ("float64", "bfloat16"), lambda s: {"x": s.y.double()}
    ),
    "combine-weights-on-one": differ(
        "combine", "top-k", (2, "none"), lambda s: {"topk_weights": s.recv_weights}
    ),
    "placement": differ(
        "Buffer",
        GIVEN,
        UNSHOWN,
        lambda s: {"placement": ints(0, 1, 2)},
        lambda s: {"placement": ints(0, 1, 1)},
    ),
    "placement-on-one": differ("Buffer", GIVEN, UNSHOWN, lambda s: {"placement": ints(0, 1, 2)}),
    "ranks_per_node": differ("Buffer", GIVEN, UNSHOWN, lambda s: {"ranks_per_node": 2}),
}


def local_layout(topk_idx: Callable[[Scene], Any], num_experts: Any, text: str) -> Case:
    return local(
        lambda s: s.buffer.get_dispatch_layout(topk_idx(s), num_experts),
        f"get_dispatch_layout: {text}, on rank {CULPRIT}",
    )


GROUP = "want group=, a torch.distributed process group, or comm=, an mpi4py communicator"
LOCAL: Cases = {
    "topk_idx-float": local_layout(
        lambda s: s.topk_weights, 6, "topk_idx has dtype float32, want int64"
    ),
    "topk_idx-1d": local_layout(
        lambda s: s.topk_idx[0], 6, "topk_idx has shape [2], want [tokens, topk]"
    ),
    "topk_idx-one-past-the-end": local_layout(
        lambda s: with_expert(s, 6), 6, f"topk_idx[3, 1] is 6, {OUTSIDE}"
    ),
    "num_experts-none": local_layout(
        lambda s: s.topk_idx, None, "num_experts is None, want an integer"
    ),
    "group-none": local(
        lambda s: Buffer(None),
        "group is None, as the default group is before init_process_group and after "
        f"destroy_process_group, {GROUP}",
    ),
    "group-text": local(lambda s: Buffer("x"), f"group is a str, {GROUP}"),
    "group-of-others": local(
        lambda s: Buffer(torch.distributed.GroupMember.NON_GROUP_MEMBER),
        f"group is GroupMember.NON_GROUP_MEMBER: this process is none of its ranks, {GROUP}",
    ),
    "comm": local(
        lambda s: Buffer(comm=object()),
        f"comm is an object, {GROUP}",
    ),
    **{
        f"set_num_sms-{kind}": local(
            partial(lambda value, s: Buffer.set_num_sms(value), value),
            f"new_num_sms is {value!r}, want an even number of at least 2",
        )
        for kind, value in {"odd": 3, "text": "4"}.items()
    },
}

CASES: Cases = {
    **one_by_one("dispatch", DISPATCH),
    **one_by_one("dispatch", LAYOUT, beside=Scene.layout),
    **one_by_one("cached dispatch", CACHED),
    **one_by_one("combine", COMBINE),
    **one_by_one("Buffer", OPEN),
    **OTHERS,
    **{f"differ-{name}": case for name, case in DIFFER.items()},
    **{f"local-{name}": case for name, case in LOCAL.items()},
}
