"""`tokenyard plan`, `simulate`, `balance`: the cost of exchanges, and where experts should live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from tokenyard.tools.cli import output
from tokenyard.tools.cli.output import Json, Mistake

if TYPE_CHECKING:
    from torch import Tensor

    from tokenyard.planner.balance import Rebalancing
    from tokenyard.planner.page import Report
    from tokenyard.topology import Topology

Cluster = Annotated[str, typer.Option(help="h800, h100, gb200, mi300x, cpu-100gbe or cpu-10gbe.")]
Ranks = Annotated[int, typer.Option(min=1, help="Ranks of the group.")]
LowLatency = Annotated[bool, typer.Option("--low-latency", help="The low-latency mode.")]
Spare = Annotated[int, typer.Option(min=0, help="Slots for copies, beside one for each expert.")]
Want = Annotated[float, typer.Option(help="Imbalance to reach, with as few moves as that takes.")]
Png = Annotated[Path | None, typer.Option(help="Draw into this file (PNG or SVG).")]
Html = Annotated[Path | None, typer.Option(help="Write a page that needs no other file.")]


class _Shown(NamedTuple):
    png: Path | None
    html: Path | None
    as_json: bool


def _show(report: Report, value: Any, draw: Callable[[], Any], to: _Shown) -> None:
    """Write the files that were asked for, and print the tables or JSON."""
    from tokenyard.planner import page, pictures

    if to.png is not None or to.html is not None:
        with output.mistakes((ModuleNotFoundError, OSError, ValueError)):
            try:
                figure = draw()
            except ModuleNotFoundError as error:
                raise Mistake("pictures need matplotlib: pip install matplotlib") from error
            if to.png is not None:
                pictures.save(figure, to.png)
            if to.html is not None:
                to.html.write_text(page.page_of(report, pictures.as_svg(figure)))

    def print_tables(console: Console) -> None:
        console.print(Text(report.title, style="bold"))
        for table in report.tables:
            console.print()
            console.print(output.table(table.columns, table.rows, title=table.title))
        if report.notes:
            console.print()
        for note in report.notes:
            console.print(Text(note))

    output.show(value, to.as_json, print_tables)


def plan(
    model: Annotated[str, typer.Option(help="A preset, such as deepseek-v3.")] = "deepseek-v3",
    cluster: Cluster = "h800",
    ranks: Ranks = 64,
    tokens: Annotated[int | None, typer.Option(help="Of a rank; 4096, or 128.")] = None,
    low_latency: LowLatency = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Dispatch in BF16, not FP8.")] = False,
    skew: Annotated[float, typer.Option(min=0.0, help="Exponent of a Zipf load; 0: even.")] = 0.0,
    sweep: Annotated[bool, typer.Option("--sweep", help="2, 4, 8 .. ranks.")] = False,
    png: Png = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Say what a layer's exchange takes on a cluster, and which link binds it.

    Time of each stage, bytes on every kind of link, memory by part, by a formula that was fitted to
    published figures. Experts' compute is not in it. Models: deepseek-v3, qwen3-235b-a22b,
    mixtral-8x7b, mixtral-8x22b, glm-4.5, kimi-k2.

    Examples:

        tokenyard plan --model deepseek-v3 --cluster h800 --ranks 64
        tokenyard plan --model kimi-k2 --cluster gb200 --ranks 64 --low-latency
        tokenyard plan --sweep --ranks 2048 --png sweep.png
    """
    from tokenyard.planner import cost, pictures, presets, reports
    from tokenyard.planner.choices import Routing

    with output.mistakes():
        shape, machines = presets.model_of(model), presets.cluster_of(cluster)
        number = tokens if tokens is not None else 128 if low_latency else 4096
        mode = "low_latency" if low_latency else "normal"
        work = cost.Work(num_tokens=number, mode=mode, fp8=not bf16)
        routing = Routing.zipf(shape.num_experts, shape.num_topk, skew) if skew else None
        sizes = [ranks]
        if sweep:
            sizes = [2**power for power in range(1, 30) if 2**power < ranks] + [ranks]
        plans = [cost.plan(machines, shape, size, work, routing) for size in sizes]
    to = _Shown(png, html, as_json)
    if sweep:
        values = [made.as_dict() for made in plans]
        _show(reports.of_sweep(plans), values, lambda: pictures.draw_sweep(plans), to)
    else:
        (made,) = plans
        _show(reports.of_plan(made), made.as_dict(), lambda: pictures.draw_stages(made), to)


def simulate(
    recording: Annotated[Path, typer.Argument(help="A file of tokenyard.record.")],
    cluster: Cluster = "h800",
    ranks: Annotated[int | None, typer.Option(min=1, help="Of the group; as it ran.")] = None,
    layer: Annotated[str | None, typer.Option(help="Of several: its name.")] = None,
    spare: Spare = 0,
    every: Annotated[int, typer.Option(min=1, help="Steps between two rebalancings.")] = 50,
    want: Want = 1.05,
    balance: Annotated[float | None, typer.Option(min=0.0, help="A Buffer's slack.")] = None,
    low_latency: LowLatency = False,
    png: Png = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Replay a recorded routing at any number of ranks, before and after rebalancing.

    Each recorded step's tokens are dealt out to the ranks; no rank is started. First experts stay
    in order, then they are rebalanced every so many steps where the load is uneven. With --balance
    ranks of a node also share each step's pairs, as those of Buffer(balance=...) do.

    Examples:

        tokenyard simulate routing.pt --cluster h800 --ranks 64
        tokenyard simulate routing.pt --ranks 32 --spare 32 --every 20 --png replay.png
    """
    from tokenyard.planner import cost, pictures, presets, reports
    from tokenyard.planner import simulate as simulation
    from tokenyard.planner.balancer import Policy
    from tokenyard.replicas import Replicas

    with output.mistakes((ValueError, OSError)):
        machines = presets.cluster_of(cluster)
        one = _layer_of(recording, layer)
        ranks = ranks or one.num_ranks
        steps = [part.numpy() for part in one.topk_idx.split(one.num_tokens.sum(1).tolist())]
        if not steps:
            raise Mistake(f"{recording} has no step of {one.name}")
        sizes = {"hidden": one.hidden, "num_experts": one.num_experts, "num_topk": one.num_topk}
        shape = cost.Model(name=one.name, intermediate=0, num_layers=1, **sizes)
        work = cost.Work(mode="low_latency" if low_latency else "normal")
        slots = cost.slots_for(one.num_experts + spare, ranks)
        placement = Replicas.even(one.num_experts, ranks, slots)
        policy = Policy(every=every, if_over=max(1.1, want), want=want)
        ways: dict[str, Any] = {"even": (placement, work), "rebalanced": (placement, work, policy)}
        if balance is not None:
            ways["balanced"] = Replicas.even(one.num_experts, ranks), work, None, balance
        replays = {}
        with output.progress("replaying", len(ways)) as step:
            for name, way in ways.items():
                replays[name] = simulation.replay(steps, machines, shape, *way)
                step(name)
    report = reports.of_replays(replays, f"{one.name} of {recording.name}")
    value = {name: found.as_dict() for name, found in replays.items()}
    to = _Shown(png, html, as_json)
    _show(report, value, lambda: pictures.draw_replay(*list(replays.values())[:2]), to)


def balance(
    loads: Annotated[Path, typer.Argument(help=r"A tensor \[E] or \[layers, E], or a recording.")],
    ranks: Annotated[int | None, typer.Option(min=1, help="Of the group; as it ran, or 8.")] = None,
    spare: Spare = 0,
    nodes: Annotated[int, typer.Option(min=1, help="Tokens prefer copies on their node.")] = 1,
    groups: Annotated[int, typer.Option(min=1, help="Keep each group on a node.")] = 1,
    current: Annotated[Path | None, typer.Option(help="A saved placement to change.")] = None,
    want: Want = 1.0,
    save: Annotated[Path | None, typer.Option(help="Write the placement here, as JSON.")] = None,
    png: Png = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Place experts, with copies of busy ones, for the load that was measured.

    Buffer(placement=Replicas.load("placement.json")) takes what --save writes; several layers have
    a file each: placement.0.json, placement.1.json and so on. With --current, a placement that was
    saved changes as little as the imbalance that you want needs. With --nodes, the ranks of each
    node use its copies first, as a Buffer does, and loads are even by that.

    Examples:

        tokenyard balance loads.pt --ranks 32 --spare 32 --save placement.json
        tokenyard balance loads.pt --current placement.json --want 1.05
        tokenyard balance loads.pt --ranks 8 --spare 4 --nodes 2 --groups 4
    """
    from tokenyard.planner import pictures, reports
    from tokenyard.planner.copies import expected_traffic
    from tokenyard.planner.even_out import even_out
    from tokenyard.replicas import Replicas

    with output.mistakes((ValueError, OSError)):
        load_LE, sizes = _loads_of(loads)
        num_layers, num_experts = load_LE.shape
        if current is not None:
            if (ranks, spare, groups) != (None, 0, 1):
                raise Mistake("--current has ranks and slots: leave out --ranks, --spare, --groups")
            held = [Replicas.load(path) for path in _files_of_layers(current, num_layers)]
            topology = _nodes_of(held[0].num_ranks, nodes)
            changes = [even_out(old, load, want, topology) for old, load in zip(held, load_LE)]
        else:
            if ranks is None and len(sizes) > 1:
                raise Mistake(f"layers of {loads} ran on {sorted(sizes)} ranks, want --ranks")
            topology = _nodes_of(ranks or min(sizes), nodes)
            changes = _placed_anew(load_LE, topology, spare, groups)
        if save is not None:
            for path, change in zip(_files_of_layers(save, num_layers), changes):
                change.placement.save(path)
    first = changes[0].placement
    what = f"{num_experts} experts in {first.num_slots} slots of {first.num_ranks} ranks"
    what += f" on {nodes} nodes" * (nodes > 1)
    report = reports.of_changes(changes, f"{what}, by {loads.name}")
    worst = max(range(num_layers), key=lambda layer: changes[layer].before)

    def draw() -> Any:
        moves, load = changes[worst].moves, load_LE[worst].numpy()
        both = [expected_traffic(one, load, topology) for one in (moves.before, moves.after)]
        return pictures.draw_balance(*both)

    _show(report, [change.as_dict() for change in changes], draw, _Shown(png, html, as_json))


def _placed_anew(load_LE: Tensor, topology: Topology, spare: int, groups: int) -> list[Rebalancing]:
    """For each layer the change from an even placement without copies."""
    from tokenyard.planner.balance import Rebalancing, place, place_by_nodes
    from tokenyard.planner.cost import slots_for
    from tokenyard.replicas import Replicas

    num_experts, num_ranks = load_LE.shape[1], topology.num_ranks
    slots = slots_for(num_experts + spare, num_ranks)
    even = Replicas.even(num_experts, num_ranks, slots)
    changes = []
    for load in load_LE:
        if groups > 1:
            made = place_by_nodes(load, slots, num_ranks, topology.num_nodes, groups)
        else:
            made = place(load, slots, num_ranks, topology)
        changes.append(Rebalancing.between(even, made, load, topology))
    return changes


def _nodes_of(num_ranks: int, num_nodes: int) -> Topology:
    from tokenyard.topology import Topology

    if num_ranks % num_nodes:
        raise Mistake(f"{num_ranks} ranks on {num_nodes} nodes: want as many ranks on each")
    return Topology.even(num_ranks, num_ranks // num_nodes)


def _files_of_layers(path: Path, num_layers: int) -> list[Path]:
    """placement.json of one layer; placement.0.json and so on of several."""
    if num_layers == 1:
        return [path]
    return [path.with_name(f"{path.stem}.{layer}{path.suffix}") for layer in range(num_layers)]


def _layer_of(recording: Path, name: str | None) -> Any:
    from tokenyard.observe.routing import file

    layers = file.load(recording)
    if name is None and len(layers) == 1:
        return layers[0]
    for layer in layers:
        if layer.name == name:
            return layer
    names = ", ".join(layer.name for layer in layers)
    given = f"{recording} has {len(layers)} layers" if name is None else f"layer is {name!r}"
    raise Mistake(f"{given}, want --layer, one of {names}")


def _tensor_of(path: Path) -> Tensor:
    import torch

    wrong = f"{path} is not a tensor that torch.save wrote"
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of several kinds, by what else the file may be
        raise ValueError(wrong) from error
    if not isinstance(found, torch.Tensor):
        raise ValueError(wrong)
    return found


def _loads_of(path: Path) -> tuple[Tensor, set[int]]:
    """[layers, E]: the tensor of a file, or how often a recording's tokens chose each expert. And
    on how many ranks layers ran, or 8.
    """
    import torch

    from tokenyard.observe.routing import file

    sizes = {8}
    try:
        found = _tensor_of(path)
    except ValueError:
        layers = file.load(path)
        sizes = {layer.num_ranks for layer in layers}
        counts = []
        for layer in layers:
            chosen = layer.topk_idx[layer.topk_idx >= 0].long()
            counts.append(torch.bincount(chosen, minlength=layer.num_experts))
        if len({len(one) for one in counts}) != 1:
            raise Mistake(f"layers of {path} differ in their experts, want one number") from None
        found = torch.stack(counts)
    if found.dim() == 1:
        found = found[None]
    if found.dim() != 2 or found.numel() == 0:
        raise Mistake(f"{path} has shape {list(found.shape)}, want [experts] or [layers, experts]")
    return found.double(), sizes
