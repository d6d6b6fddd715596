"""Memory that runs out on one rank, at any place of any call: all ranks raise, and the Buffer goes
on (`docs/internals/failures.md`).
"""

from __future__ import annotations

import pytest

from tests.cases.no_memory import LAYOUTS, TRANSPORTS, walk

pytestmark = pytest.mark.faults

FEW = [
    ("by source", "direct"),
    ("by expert", "direct"),
    ("by expert, FP8", "direct"),
    ("combine", "direct"),
    ("combine of shared rows, with weights and biases", "direct"),
    ("prepared by source", "direct"),
    ("low latency", "direct"),
    ("by expert", "direct with a balance"),
    ("combine of shared rows, with weights and biases", "by nodes"),
    ("by expert", "collective"),
    ("prepared by source", "hierarchical"),
]
_MORE = ("low latency", "elastic", "elastic expand", "hybrid")


def ranks_of(transport: str) -> int:
    return 4 if TRANSPORTS[transport].get("ranks_per_node") == 2 else 2


def check(layout: str, transport: str) -> None:
    """The first call of a Buffer, and one that finds all memory of earlier calls."""
    both = [walk(ranks_of(transport), layout, transport, warm=warm) for warm in (0, 3)]
    for found in both:
        told = f"{found.raised} raised, {len(found.broken)} broke the Buffer"
        print(f"{layout}, {transport}: {found.injected} allocations failed, {told}")
        assert not found.wrong
        # Memory of the process that is taken when ranks have met: the page names it.
        assert not found.broken or not transport.startswith("direct")
    assert sum(found.injected for found in both)


@pytest.mark.parametrize(("layout", "transport"), FEW)
def test_some_calls(layout: str, transport: str) -> None:
    check(layout, transport)


def whole() -> list[tuple[str, str]]:
    takes = [
        (layout, transport)
        for transport in TRANSPORTS
        for layout in (*LAYOUTS, *_MORE)
        if layout in LAYOUTS or transport in ("direct", "ring", "collective", "hierarchical")
    ]
    return [one for one in takes if one not in FEW]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "transport"), whole())
def test_all_calls(layout: str, transport: str) -> None:
    check(layout, transport)
