"""What calls return and users hold: its copies outlive it, and writing to it changes no call."""

from __future__ import annotations

import copy
import gc
import pickle
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import tokenyard
from tests.cases import held
from tests.cases.held import Made
from tokenyard.compat import hybrid_ep
from tokenyard.compat.hybrid_ep import buffer as hybrid_buffer
from tokenyard.nn import functional
from tokenyard.testing import assert_same, run_virtual

OPTIONS: dict[str, dict[str, Any]] = {
    "direct": {"transport": "direct"},
    "ring": {"transport": "ring"},
    "nodes": {"transport": "hierarchical", "ranks_per_node": 1},
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
}


class Case(NamedTuple):
    of: str  # the exported name
    make: Callable[[Any], Made]
    kind: str = ""  # of the Buffer
    refuses: str = ""  # what pickling it raises, if it does


ONCE = "cannot pickle a {}, which belongs to this process"
LL = ONCE.format("LowLatencyHandle")
X = torch.ones(8, 8)
PLACED = tokenyard.Replicas([[0, 1, 2, 3], [4, 5, 6, 7, 0]])
CASES = [
    Case("Aligned", held.aligned),
    Case("Buffer", held.buffer_itself, "", ONCE.format("Buffer")),
    Case("Combined", lambda b: held.plain(b.combine(torch.ones(16, 8), b.all_gather(X).handle))),
    Case("Config", lambda _: held.plain(tokenyard.Config(24))),
    Case("DispatchLayout", lambda b: held.plain(b.get_dispatch_layout(held.routed(0)[1], held.E))),
    Case("Dispatched", held.by_source),
    Case("DispatchedByExpert", held.by_expert),
    Case("DispatchedWithPermute", held.hybrid, "hybrid"),
    Case("EPHandle", lambda b: held.handle_of(held.elastic(b)), "elastic"),
    Case("EPHandle", lambda b: held.handle_of(held.elastic(b, expand=True)), "elastic"),
    Case("EPHandle", partial(held.elastic, expand=True, sync=False), "elastic"),
    Case(
        "ElasticBuffer",
        lambda b: (b, lambda one: one.rank),
        "elastic",
        ONCE.format("ElasticBuffer"),
    ),
    Case("EventHandle", lambda b: (held.event(b)[0].event, held.event(b)[1])),
    Case("EventOverlap", held.event),
    Case("Gathered", held.gathered),
    Case("Handle", lambda b: held.handle_of(held.by_source(b))),
    Case("Handle", lambda b: held.handle_of(held.by_source(b, later=True))),
    Case("Handle", lambda b: held.handle_of(held.by_expert(b))),
    Case("Handle", partial(held.by_source, counted=True)),
    Case(
        "HybridEPBuffer",
        lambda b: (b, lambda one: one.rank),
        "hybrid",
        ONCE.format("HybridEPBuffer"),
    ),
    Case("HybridHandle", lambda b: held.handle_of(held.hybrid(b)), "hybrid"),
    Case("LowLatencyCombined", held.low_latency_sums, "low latency"),
    Case("LowLatencyDispatched", held.low_latency, "low latency", LL),
    Case("LowLatencyDispatched", partial(held.low_latency, hook=True), "low latency", ONCE[:13]),
    Case("LowLatencyHandle", lambda b: held.handle_of(held.low_latency(b)), "low latency", LL),
    Case("Moves", lambda _: held.plain(PLACED.moves(PLACED))),
    Case("Permuted", lambda _: held.plain(tokenyard.permute(X, torch.zeros(8, 1).long(), 1))),
    Case("Prepared", held.prepared, "", ONCE.format("Prepared")),
    Case("Prepared", partial(held.prepared, by_expert=False), "", ONCE.format("Prepared")),
    Case("PreparedRows", held.prepared_rows),
    Case("PreparedRows", partial(held.prepared_rows, by_expert=False)),
    Case("Replicas", lambda _: held.plain(PLACED)),
    Case("Replicas", lambda b: held.plain(b.get_placement(held.E))),
]
# Of nn.functional, whose rows' tickets stand for handles that live as long as they do.
THROUGH_NN = [
    Case("", partial(held.through_nn, by_expert=by_expert)) for by_expert in (True, False)
]


def test_every_exported_type_has_a_case() -> None:
    """Errors are pickled in tests/faults."""
    exported = [(name, getattr(tokenyard, name)) for name in tokenyard.__all__]
    types = {name for name, one in exported if isinstance(one, type)}
    types -= {name for name, one in exported if name in types and issubclass(one, Exception)}
    types |= {name for name in hybrid_ep.__all__ if isinstance(getattr(hybrid_ep, name), type)}
    types.add(hybrid_buffer.DispatchedWithPermute.__name__)
    assert {case.of for case in CASES} == types


def overwrite() -> list[Any]:
    """Take memory of many sizes, as what has died may have had, and write to it."""
    sizes = [1 << power for power in range(3, 15)]
    words = [array("q", [-(1 << 40)]) * (size + more) for size in sizes for more in range(0, 64, 3)]
    return [words, [torch.full((size,), -(1 << 40)) for size in sizes for _ in range(8)]]


def copied(group: Any, kind: str, options: dict[str, Any]) -> None:
    buffer = held.opened(group, kind, options)
    for case in CASES:
        if case.kind != kind:
            continue
        for way, clone in WAYS.items():
            made, use = case.make(buffer)
            if way == "pickle" and case.refuses:
                with pytest.raises(TypeError, match=case.refuses):
                    clone(made)
                continue
            one, want = clone(made), use(made)
            del made
            gc.collect(1)
            kept = overwrite()
            assert_same(use(one), want, f"{case.of} by {way}")
            del one, kept
    buffer.destroy()


@pytest.mark.parametrize("kind", ["", "elastic", "hybrid", "low latency"])
@pytest.mark.parametrize("name", OPTIONS)
def test_copies_outlive_what_they_are_of(name: str, kind: str) -> None:
    run_virtual(copied, 2, kind, OPTIONS[name])


def written_to(group: Any, kind: str, options: dict[str, Any]) -> None:
    buffer = held.opened(group, kind, options)
    for case in [*CASES, *THROUGH_NN] if not kind else CASES:
        if case.kind != kind:
            continue
        _, use = case.make(buffer)
        if use is held.told or case.of.startswith(("Prepared", "Event")) or "Buffer" in case.of:
            continue  # no later call goes by it
        for number in (0, 1 << 30):
            made, _ = case.make(buffer)
            want, (made, use) = use(made), case.make(buffer)
            for one in held.tensors(made):  # before others are made when they are read
                one.logical_not_() if one.dtype == torch.bool else one.fill_(number)
            assert_same(use(made)[:2], want[:2], f"{case.of} after {number} in all fields")
    buffer.destroy()


@pytest.mark.parametrize("kind", ["", "elastic", "hybrid", "low latency"])
@pytest.mark.parametrize("name", OPTIONS)
def test_what_a_user_writes_to_changes_no_call(name: str, kind: str) -> None:
    run_virtual(written_to, 2, kind, OPTIONS[name])


class Layer(nn.Module):
    """A layer of a user's own, which prepares its exchange."""

    def __init__(self, buffer: tokenyard.Buffer) -> None:
        super().__init__()
        self.step, self.use = held.prepared(buffer)


def test_a_module_with_a_prepared_exchange_is_copied() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer = Layer(buffer)
            other = copy.deepcopy(layer)
            assert other.step is layer.step
            assert_same(layer.use(other.step), layer.use(layer.step))

    run_virtual(job, 2)


def tickets(group: Any) -> None:
    """A copy of nn.functional's rows has a ticket of nothing once the rows have died."""
    with tokenyard.Buffer(group) as buffer:
        rows, use = held.through_nn(buffer)
        other = copy.deepcopy(rows)
        assert_same(use(other), use(rows))
        del rows
        with pytest.raises(ValueError, match="handle is None, want the handle that dispatch"):
            functional.combine_by_expert(buffer, other.x, other)


def test_tickets_outlive_no_rows() -> None:
    run_virtual(tickets, 2)
