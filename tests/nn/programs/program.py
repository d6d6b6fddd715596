"""What a program is: layers, how they are trained, and what happens to them between steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DENSE = {  # parameters that every rank has, by what can be frozen
    "router": ("router.weight",),
    "shared": ("shared.gate_up.weight", "shared.down.weight"),
}
EXPERTS = ("experts.gate_up", "experts.down")
ADAPTERS = ("experts.first", "experts.second")  # added to gate_up: first @ second, of each expert
BY_HAND = "by hand"  # no optimiser of torch: gradients between -1 and 1, times the rate

Slots = tuple[tuple[int, ...], ...]  # the experts of each rank, in the order of its stack


@dataclass(frozen=True, kw_only=True)
class Layer:
    router: dict[str, Any]  # RouterConfig's options, all of them
    intermediate: int
    shared: int
    frozen: tuple[str, ...]  # of router, experts and shared
    slots: Slots
    placed: bool  # the Buffer is told so; otherwise it comes to the same by itself
    num_worst_tokens: int
    adapter: int = 0  # the rank of a low-rank adapter of gate_up; 0 for none

    @property
    def num_experts(self) -> int:
        return self.router["num_experts"]

    def trains(self, what: str) -> bool:
        """Whether it has such parameters, and they are not frozen."""
        if what == "experts" and self.adapter:
            return True
        return what not in self.frozen and (what != "shared" or self.shared > 0)


@dataclass(frozen=True, kw_only=True)
class Move:
    """Other placements, by Buffer, before a step."""

    slots: tuple[Slots, ...]
    how: str = "together"  # or behind: others than the first model raise before they follow too;
    # or by hand: the Buffer alone at first, so that all raise
    refused: str = ""  # count, differ or adapter: why it must be refused, and change nothing


@dataclass(frozen=True, kw_only=True)
class Step:
    """One or two micro-batches, whose gradients add up; then the optimiser, then the biases."""

    shapes: tuple[tuple[tuple[int, ...], ...], ...]  # of each call and rank, without the width
    training: bool
    mode: str  # backward, no_grad or inference
    with_auxiliary: bool  # the loss has auxiliary_losses
    learning_rate: float  # times the hidden size; 0 for no step of the optimiser
    update_biases: bool
    model: int = 0  # which one
    move: Move | None = None
    overflow: tuple[int, str] | None = None  # a rank, and experts or dense: a gradient is infinite
    wide_rank: int = -1  # gives tokens of another width first, which all ranks must refuse

    @property
    def num_ranks(self) -> int:
        return len(self.shapes[0])


@dataclass(frozen=True, kw_only=True)
class Restart:
    """A checkpoint is saved before a step, and loaded on so many ranks."""

    step: int
    num_ranks: int
    slots: tuple[Slots, ...]  # of each layer
    placed: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    seed: int
    attempt: int  # drawn anew so often, since choices were close to a tie
    num_ranks: int
    transport: str
    kernels: str
    ranks_per_node: tuple[int, ...] | None
    dtype: str
    hidden: int
    layers: tuple[Layer, ...]
    own_buffers: bool  # each layer has a Buffer of its own
    residual: bool
    checkpoint: str  # none, layer (each by itself), model; or reentrant layer, reentrant model
    average: bool  # average_expert_gradients
    strides: str  # of the inputs: plain, transposed or gapped
    x_requires_grad: tuple[bool, ...]  # on each rank
    loss: str  # weighted, or sum, whose gradient has strides of 0
    steps: tuple[Step, ...]
    order: tuple[int, ...] = ()  # in which layers are called, if not one after the other
    num_models: int = 1  # alike, on the same Buffers
    ema: bool = False  # a copy that follows the first model
    optimiser: str = BY_HAND
    split: bool = False  # experts have an optimiser of their own
    clip: tuple[float, float] | None = None  # the largest norm, and its order
    scaler: bool = False
    wrapper: str = "none"  # ddp or fsdp2
    compiled: str = "none"  # inside or outside the wrapper
    restart: Restart | None = None
    last: str = ""  # ddp, fsdp2 or adapter: what must be refused at the end

    @property
    def calls(self) -> tuple[int, ...]:
        """The layers in the order in which they are called."""
        return self.order or tuple(range(len(self.layers)))

    @property
    def on_processes(self) -> bool:
        """Whether it needs ranks that torch.distributed knows."""
        wrapped = {self.wrapper, self.compiled} != {"none"} or self.last in ("ddp", "fsdp2")
        return wrapped or self.restart is not None

    @property
    def synced(self) -> bool:
        """Whether gradients of dense parameters are compared after ranks have exchanged them."""
        return self.optimiser != BY_HAND or self.wrapper != "none"

    @property
    def num_processes(self) -> int:
        return max(self.num_ranks, self.restart.num_ranks if self.restart else 0)

    def overflows(self, step: Step, slots: Slots) -> str | None:
        """Which parameters of the first layer, on these slots, get an infinite gradient."""
        if step.overflow is None or not step.learning_rate:
            return None
        rank, what = step.overflow
        layer = self.layers[0]
        can = {
            "experts": layer.trains("experts") and bool(slots[rank]),
            "dense": layer.trains("router") and self.wrapper != "fsdp2",
        }
        return what if can[what] else None

    def features(self) -> Iterator[str]:
        """What a run of many programs counts."""
        layers, steps = self.layers, self.steps
        moves = [step.move for step in steps if step.move]
        shapes = [shape for step in steps for call in step.shapes for shape in call]
        yield from (f"{self.num_ranks} ranks", f"{len(layers)} layers")
        yield from (self.transport, self.kernels, self.dtype)
        yield from (f"loss {self.loss}", f"x {self.strides}", f"checkpoint {self.checkpoint}")
        yield from (f"wrapper {self.wrapper}", f"optimiser {self.optimiser}")
        yield from (f"moved {move.how}" for move in moves if not move.refused)
        yield from (f"refused: {move.refused}" for move in moves if move.refused)
        for layer in layers:
            yield layer.router["score"]
            yield from (f"frozen {name}" for name in layer.frozen)
            yield from (
                name for name in ("normalise", "auxiliary_loss", "bias_rate") if layer.router[name]
            )
        placements = [layer.slots for layer in layers]
        placements += [slots for move in moves if not move.refused for slots in move.slots]
        placements += self.restart.slots if self.restart else ()
        flags = {
            "residual": self.residual,
            "averaged": self.average,
            "own Buffers": self.own_buffers,
            "x without grad": not any(self.x_requires_grad),
            "x with grad on some ranks": len(set(self.x_requires_grad)) > 1,
            "micro-batches": any(len(step.shapes) > 1 for step in steps),
            "evaluation": any(not step.training for step in steps),
            "optimiser": any(step.learning_rate for step in steps),
            "biases moved": any(step.update_biases for step in steps),
            "a rank without tokens": any(0 in shape for shape in shapes),
            "a rank without experts": any(() in slots for slots in placements),
            "copies": any(has_copies(slots) for slots in placements),
            "two copies on one rank": any(
                len(set(one)) < len(one) for slots in placements for one in slots
            ),
            "placement": any(layer.placed for layer in layers),
            "static rows": any(layer.num_worst_tokens for layer in layers),
            "groups": any(layer.router["num_groups"] > 1 for layer in layers),
            "shared": any(layer.shared for layer in layers),
            "adapters": any(layer.adapter for layer in layers),
            "a layer called twice": bool(self.order),
            "two models": self.num_models > 1,
            "EMA": self.ema,
            "two optimisers": self.split,
            "clipped": self.clip is not None,
            "scaler": self.scaler,
            "overflow": self.scaler and any(step.overflow for step in steps),
            "compiled": self.compiled != "none",
            "loaded": self.restart is not None,
            "loaded on other ranks": self.restart is not None
            and self.restart.num_ranks != self.num_ranks,
            "refused: width": any(step.wide_rank >= 0 for step in steps),
            f"refused: {self.last} at the end": bool(self.last),
            "processes": self.on_processes,
        }
        yield from (name for name, is_so in flags.items() if is_so)


def has_copies(slots: Slots) -> bool:
    held = [expert for experts in slots for expert in experts]
    return len(set(held)) < len(held)


def num_tokens(shape: tuple[int, ...]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number
