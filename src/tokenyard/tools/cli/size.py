"""`tokenyard size`: the memory that a Buffer takes, by part."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tokenyard.tools.cli import output
from tokenyard.tools.cli.output import Json

if TYPE_CHECKING:
    from tokenyard.tools.sizing import Workload


def size(
    tokens: Annotated[int, typer.Option(help="Of each rank in a call.")],
    hidden: Annotated[int, typer.Option(help="Elements of a row.")],
    topk: Annotated[int, typer.Option(help="Experts of a token.")],
    experts: Annotated[int, typer.Option(help="Of all ranks.")],
    ranks: Annotated[int, typer.Option(help="Of all machines.")],
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    low_latency: Annotated[
        bool, typer.Option("--low-latency", help="With low_latency_mode; tokens is its most.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of rows.")] = "bfloat16",
    transport: Annotated[
        str, typer.Option(help="auto, direct, ring, collective or hierarchical.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Say how much memory a Buffer takes, part by part, and why.

    Figures are of one rank while a dispatch and its combine are alive: with a routing that is even
    over experts, and at worst, where every token of every rank has an expert on this rank. Shared
    memory counts once for a machine, however many of its ranks map it.

    Examples:

        tokenyard size --tokens 4096 --hidden 7168 --topk 8 --experts 256 --ranks 8
        tokenyard size --tokens 4096 --hidden 7168 --topk 8 --experts 256 --ranks 16 --nodes 2
        tokenyard size --tokens 128 --hidden 7168 --topk 8 --experts 256 --ranks 8 --low-latency
    """
    import torch

    from tokenyard.tools import sizing

    named = getattr(torch, dtype, None)
    if not isinstance(named, torch.dtype):
        raise output.Mistake(f"dtype is {dtype!r}, want one like bfloat16 or float32")
    with output.mistakes():
        work = sizing.Workload(
            num_tokens=tokens,
            hidden=hidden,
            num_topk=topk,
            num_experts=experts,
            num_ranks=ranks,
            num_nodes=nodes,
            dtype=named,
            transport=transport,
            low_latency=low_latency,
        )
    output.show(_told(work), as_json, partial(_draw, work))


def _told(work: Workload) -> dict[str, Any]:
    from tokenyard.tools import sizing

    even, worst = sizing.parts(work), sizing.parts(work, work.most_rows)
    per_node = work.num_ranks // work.num_nodes
    return {
        "transport": work.chosen,
        "rows": {"even": work.even_rows, "worst": work.most_rows},
        "parts": [
            {
                "part": one.name,
                "memory": one.kind,
                "even": one.num_bytes,
                "worst": other.num_bytes,
                "exact": one.is_exact,
                "why": one.why,
            }
            for one, other in zip(even, worst)
        ],
        "rank": {"even": sizing.total(even), "worst": sizing.total(worst)},
        "machine": {
            "even": per_node * sizing.total(even),
            "worst": per_node * sizing.total(worst),
            "ranks": per_node,
        },
    }


def _draw(work: Workload, console: Console) -> None:
    from tokenyard.tools import sizing

    even, worst = sizing.parts(work), sizing.parts(work, work.most_rows)
    per_node = work.num_ranks // work.num_nodes
    console.print(
        f"transport {work.chosen}; a rank gets {work.even_rows} rows of a dispatch if routing "
        f"is even, {work.most_rows} at worst\n"
    )
    rows = [
        [
            one.name,
            one.kind,
            output.bytes_text(one.num_bytes),
            output.bytes_text(other.num_bytes),
        ]
        for one, other in zip(even, worst)
    ]
    for name, times in (("a rank", 1), (f"a machine, {per_node} ranks", per_node)):
        both = (output.bytes_text(times * sizing.total(found)) for found in (even, worst))
        rows.append([name, "", *both])
    console.print(output.table(["part", "memory", "even", "worst"], rows, right=(2, 3)))
    console.print()
    for one in even:
        mark = "" if one.is_exact else " (at most)"
        console.print(output.hanging(f"{one.name}{mark}: {one.why}", 4))
