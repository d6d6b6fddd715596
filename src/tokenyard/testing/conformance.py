"""Does this installation give the specification's bits? For people, on their own machines.

    from tokenyard.testing.conformance import checks, run

    for verdict in run(2):
        print(verdict.check, verdict.state, verdict.detail)

Ranks are processes. Each check opens a Buffer on one transport, in one mode, and makes a few calls
whose every output `spec` knows. tokenyard's own tests know many more cases; these are the ones that
a broken installation, compiler, kernel or machine would fail first.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import spec, validate
from tokenyard.buffer import Buffer
from tokenyard.testing.compare import assert_same, poisoned
from tokenyard.testing.processes import Processes, RankFailed
from tokenyard.testing.routing import fake_experts, numbered_tokens, routing
from tokenyard.transports import available

NORMAL, LOW_LATENCY = "normal", "low latency"
OK, FAILED, NOT_HERE = "ok", "failed", "not here"
MOST_RANKS = 64
_TOKENS = (7, 0, 12, 5)  # by rank, again and again
_NUM_MAX, _TOPK, _EXPERTS = 12, 3, 8
_KINDS = ("uniform", "holes", "one", "none")
_DTYPES = (torch.bfloat16, torch.float32)
_SECONDS = 300.0  # for one check, which may have to compile its kernels
_REFUSED = "cannot be used: "


@dataclass(frozen=True)
class Check:
    """One transport in one mode, between so many ranks."""

    transport: str
    mode: str
    num_ranks: int

    @property
    def ranks_per_node(self) -> int | None:
        """Half of them, where there are two levels to be checked."""
        return -(-self.num_ranks // 2) if self.transport == "hierarchical" else None

    @property
    def world(self) -> spec.World:
        nodes = self.ranks_per_node if self.mode == NORMAL else None
        return spec.World.even(_EXPERTS, self.num_ranks, nodes)


class Verdict(NamedTuple):
    check: Check
    state: str  # OK, FAILED or NOT_HERE
    detail: str  # what differs, or why it cannot run here
    calls: int
    seconds: float


class Call(NamedTuple):
    kind: str  # of routing
    dtype: torch.dtype
    use_fp8: bool = False


def checks(num_ranks: int) -> list[Check]:
    """Every transport in every mode."""
    validate.integer("num_ranks", num_ranks, at_least=1, at_most=MOST_RANKS)
    modes = (NORMAL, LOW_LATENCY)
    return [Check(name, mode, num_ranks) for name in available() for mode in modes]


def calls_of(check: Check) -> list[Call]:
    """The calls of a check, there and back each."""
    made = [Call(kind, dtype) for dtype in _DTYPES for kind in _KINDS]
    if check.mode == LOW_LATENCY:
        made.append(Call("holes", torch.bfloat16, use_fp8=True))
    return made


def run(num_ranks: int) -> Iterator[Verdict]:
    """Verdicts as they come. A check that fails ends no other."""
    todo, ranks = checks(num_ranks), None
    try:
        for check in todo:
            begin = time.monotonic()
            state, detail = OK, ""
            try:
                ranks = ranks or Processes(num_ranks, timeout=_SECONDS)
                outs = ranks.run(_rank, check)
                refused = [one for one in outs if isinstance(one, str)]
                if refused:
                    state, detail = NOT_HERE, refused[0]
                else:
                    compare(check, outs)
            except (AssertionError, TimeoutError, OSError) as error:
                state, detail = FAILED, _last_line(error)
                if not isinstance(error, AssertionError) or isinstance(error, RankFailed):
                    # Ranks may be gone, or amid a call.
                    if ranks is not None:
                        ranks.close()
                    ranks = None
            yield Verdict(check, state, detail, len(calls_of(check)), time.monotonic() - begin)
    finally:
        if ranks is not None:
            ranks.close()


def run_here(group: Any) -> Iterator[Verdict]:
    """As `run`, in ranks that are there already: all of them make this call, and each gets the
    verdicts. A check that fails on some ranks alone ends them all.
    """
    for check in checks(group.size()):
        begin = time.monotonic()
        state, detail = OK, ""
        file = io.BytesIO()
        torch.save(_rank(group, check), file)
        with Buffer(group, transport="collective") as buffer:
            mine = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
            sizes = buffer.all_gather(torch.tensor([[len(mine)]]))[0].flatten().tolist()
            everything = buffer.all_gather(mine[:, None])[0].flatten()
        told = [io.BytesIO(one.numpy().tobytes()) for one in everything.split(sizes)]
        outs = [torch.load(one, weights_only=True) for one in told]
        refused = [one for one in outs if isinstance(one, str)]
        if refused:
            state, detail = NOT_HERE, refused[0]
        else:
            try:
                compare(check, outs)
            except AssertionError as error:
                state, detail = FAILED, _last_line(error)
        yield Verdict(check, state, detail, len(calls_of(check)), time.monotonic() - begin)


def _rank(group: Any, check: Check) -> list[dict[str, Any]] | str:
    with poisoned():
        return job(group, check)


def job(group: Any, check: Check) -> list[dict[str, Any]] | str:
    """On each rank: the outputs of every call, or why the transport cannot be used here."""
    is_fast = check.mode == LOW_LATENCY
    try:
        buffer = Buffer(
            group,
            transport=check.transport,
            ranks_per_node=check.ranks_per_node,
            low_latency_mode=is_fast,
        )
    except ValueError as error:
        if _REFUSED not in str(error):
            raise
        return str(error).partition(_REFUSED)[2]
    make = _low_latency_call if is_fast else _call
    with buffer:
        return [
            make(buffer, check, call, *_inputs(group.rank(), number, call))
            for number, call in enumerate(calls_of(check))
        ]


def _inputs(rank: int, number: int, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """x, topk_idx and weights; tokens are numbered over all ranks and calls."""
    num_tokens = _TOKENS[(rank + number) % len(_TOKENS)]
    first = 100_000 * number + 1000 * rank
    hidden = 256 if call.use_fp8 else 40
    x = numbered_tokens(num_tokens, hidden, first=first, dtype=call.dtype)
    return x, *routing(call.kind, num_tokens, _TOPK, _EXPERTS, seed=first)


def _call(
    buffer: Buffer, check: Check, call: Call, x: Tensor, topk_idx: Tensor, weights: Tensor
) -> dict[str, Any]:
    got: Any = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=_EXPERTS)
    own = check.world.experts_of(buffer.rank)
    y = fake_experts(got.recv_x, got.recv_topk_idx, got.recv_topk_weights, own)
    back = buffer.combine(y, got.handle, got.recv_topk_weights)
    return {
        "x": got.recv_x,
        "topk_idx": got.recv_topk_idx,
        "topk_weights": got.recv_topk_weights,
        "per expert": got.num_recv_tokens_per_expert_list,
        "combined": back[0],
        "combined weights": back[1],
    }


def _low_latency_call(
    buffer: Buffer, check: Check, call: Call, x: Tensor, topk_idx: Tensor, weights: Tensor
) -> dict[str, Any]:
    got: Any = buffer.low_latency_dispatch(x, topk_idx, _NUM_MAX, _EXPERTS, use_fp8=call.use_fp8)
    recv_x, scales = got.recv_x if call.use_fp8 else (got.recv_x, None)
    y = _slot_experts(check, call, buffer.rank, recv_x, scales, got.recv_count)
    back = buffer.low_latency_combine(y, topk_idx, weights, got.handle)
    return _by_slot(recv_x, scales, got.recv_count, back.combined_x)


def _slot_experts(
    check: Check, call: Call, rank: int, x: Tensor, scales: Tensor | None, count: Tensor
) -> Tensor:
    """Expert e multiplies by e + 1. Slots that hold nothing get NaN."""
    used = torch.arange(x.shape[1]) < count[:, None]
    rows = torch.full(x.shape, float("nan"), dtype=torch.float64)
    values = x[used] if scales is None else spec.cast_back(x[used], scales[used])
    rows[used] = values.double()
    gain = torch.tensor([e + 1.0 for e in check.world.experts_of(rank)]).double()
    return (rows * gain[:, None, None]).to(call.dtype)


def _by_slot(x: Tensor, scales: Tensor | None, count: Tensor, combined: Tensor) -> dict[str, Any]:
    """The slots that hold something, by name; the others hold anything."""
    used = torch.arange(x.shape[1]) < count[:, None]
    rows = x[used].view(torch.uint8) if scales is not None else x[used]
    named = {"count": count.clone(), "x": rows.clone(), "combined": combined}
    if scales is not None:
        named["scales"] = scales[used].clone()
    return named


def compare(check: Check, outs: list[Any]) -> None:
    """Raise AssertionError, with rank, call and name, where ranks did not get what `spec` says."""
    for number, call in enumerate(calls_of(check)):
        want = (_slots_wanted if check.mode == LOW_LATENCY else _wanted)(check, number, call)
        dtype = str(call.dtype).removeprefix("torch.")
        for rank, named in enumerate(want):
            got, where = outs[rank][number], f"rank {rank}, routing {call.kind}, {dtype}: "
            assert got.keys() == named.keys(), f"{where}outputs are {list(got)}"
            for name, value in named.items():
                assert_same(got[name], value, where + name)


def _given(check: Check, number: int, call: Call) -> list[list[Tensor]]:
    """x, topk_idx and weights of all ranks."""
    given = [_inputs(rank, number, call) for rank in range(check.num_ranks)]
    return [[one[place] for one in given] for place in range(3)]


def _wanted(check: Check, number: int, call: Call) -> list[dict[str, Any]]:
    world, (xs, topk_idxs, weights) = check.world, _given(check, number, call)
    layouts = [spec.layout(one, world) for one in topk_idxs]
    received: list[Any] = spec.dispatch(
        xs, layouts, world, topk_idxs=topk_idxs, topk_weights=weights
    )
    ys = [
        fake_experts(got.x, got.topk_idx, got.topk_weights, world.experts_of(rank))
        for rank, got in enumerate(received)
    ]
    combined = spec.combine(ys, layouts, world)
    back = spec.combine([got.topk_weights for got in received], layouts, world)
    return [
        {
            "x": got.x,
            "topk_idx": got.topk_idx,
            "topk_weights": got.topk_weights,
            "per expert": got.num_tokens_per_expert,
            "combined": combined[rank],
            "combined weights": back[rank],
        }
        for rank, got in enumerate(received)
    ]


def _slots_wanted(check: Check, number: int, call: Call) -> list[dict[str, Any]]:
    world, (xs, topk_idxs, weights) = check.world, _given(check, number, call)
    options = {"use_fp8": call.use_fp8}
    received = spec.low_latency_dispatch(xs, topk_idxs, world, _NUM_MAX, **options)
    ys = [
        _slot_experts(check, call, rank, got.x, got.scales, got.count)
        for rank, got in enumerate(received)
    ]
    combined = spec.low_latency_combine(ys, topk_idxs, weights, received, world)
    return [
        _by_slot(got.x, got.scales, got.count, combined[rank]) for rank, got in enumerate(received)
    ]


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if isinstance(error, RankFailed) and lines else (lines or ["no message"])[0]
