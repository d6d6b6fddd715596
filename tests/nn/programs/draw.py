"""Programs of the layer by chance: draw(seed) gives the same wherever it is called."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SCORES = ("softmax", "sigmoid")
DENSE = {  # parameters that every rank has, by what can be frozen
    "router": ("router.weight",),
    "shared": ("shared.gate_up.weight", "shared.down.weight"),
}
EXPERTS = ("experts.gate_up", "experts.down")


@dataclass(frozen=True, kw_only=True)
class Layer:
    router: dict[str, Any]  # RouterConfig's options, all of them
    intermediate: int
    shared: int
    frozen: tuple[str, ...]  # of router, experts and shared
    rank_of_expert: tuple[int, ...]
    placed: bool  # the Buffer is told so; otherwise it comes to the same by itself
    num_worst_tokens: int

    @property
    def num_experts(self) -> int:
        return self.router["num_experts"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One or two micro-batches, whose gradients add up; then the optimiser, then the biases."""

    shapes: tuple[tuple[tuple[int, ...], ...], ...]  # of each call and rank, without the width
    training: bool
    mode: str  # backward, no_grad or inference
    with_auxiliary: bool  # the loss has auxiliary_losses
    learning_rate: float  # times the hidden size; 0 for no step of the optimiser
    update_biases: bool


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
    checkpoint: str  # none, layer (each by itself) or model
    average: bool  # average_expert_gradients
    strides: str  # of the inputs: plain, transposed or gapped
    x_requires_grad: tuple[bool, ...]  # on each rank
    loss: str  # weighted, or sum, whose gradient has strides of 0
    steps: tuple[Step, ...]

    def features(self) -> Iterator[str]:
        """What a run of many programs counts."""
        layers, steps = self.layers, self.steps
        shapes = [shape for step in steps for call in step.shapes for shape in call]
        yield from (f"{self.num_ranks} ranks", f"{len(layers)} layers")
        yield from (self.transport, self.kernels, self.dtype)
        yield from (f"loss {self.loss}", f"x {self.strides}", f"checkpoint {self.checkpoint}")
        for layer in layers:
            yield layer.router["score"]
            yield from (f"frozen {name}" for name in layer.frozen)
            yield from (
                name for name in ("normalise", "auxiliary_loss", "bias_rate") if layer.router[name]
            )
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
            "a rank without experts": any(
                len(set(layer.rank_of_expert)) < self.num_ranks for layer in layers
            ),
            "placement": any(layer.placed for layer in layers),
            "static rows": any(layer.num_worst_tokens for layer in layers),
            "groups": any(layer.router["num_groups"] > 1 for layer in layers),
            "shared": any(layer.shared for layer in layers),
        }
        yield from (name for name, is_so in flags.items() if is_so)


def draw(seed: int, num_ranks: int | None = None, attempt: int = 0) -> Program:
    """On so many ranks, or on 1 to 6."""
    rng = random.Random(f"{seed} on {num_ranks}, attempt {attempt}")
    num_ranks = num_ranks or rng.randint(1, 6)
    dtype = rng.choice(["float64"] * 6 + ["float32"] * 3 + ["bfloat16"])
    kernels = rng.choice(["numba", "numba", "numba", "reference"])
    transport = "collective"  # the only one that the reference kernels can use
    if kernels == "numba":
        transport = rng.choice(["direct", "direct", "ring", "collective", "hierarchical"])
    # What bfloat16 rounds would change the choices of a second layer, and of a second step.
    num_layers = 1 if dtype == "bfloat16" else rng.choice([1, 1, 2])
    moves = dtype != "bfloat16" and rng.random() < 0.6
    steps = tuple(_draw_step(rng, num_ranks, moves) for _ in range(rng.choice([1, 1, 2, 3])))
    own_buffers = num_layers > 1 and rng.random() < 0.3
    layers = [_draw_layer(rng, num_ranks, steps)]
    for _ in range(num_layers - 1):
        # A Buffer that is told the placement of experts is told their number.
        like = layers[0] if layers[0].placed and not own_buffers else None
        layers.append(_draw_layer(rng, num_ranks, steps, like, may_place=own_buffers))
    some_grad = rng.random()
    x_requires_grad = tuple(some_grad < 0.7 for _ in range(num_ranks))
    if some_grad > 0.85 and "router" not in layers[0].frozen:  # else all ranks must be alike
        x_requires_grad = tuple(rng.random() < 0.5 for _ in range(num_ranks))
    return Program(
        seed=seed,
        attempt=attempt,
        num_ranks=num_ranks,
        transport=transport,
        kernels=kernels,
        ranks_per_node=_split(rng, num_ranks) if transport == "hierarchical" else None,
        dtype=dtype,
        hidden=rng.choice([1, 2, 3, 5, 7, 8, 8, 13, 16, 16, 24, 33]),
        layers=tuple(layers),
        own_buffers=own_buffers,
        residual=rng.random() < 0.5,
        checkpoint=rng.choice(["none", "none", "none", "layer", "model"]),
        average=rng.random() < 0.5,
        strides=rng.choice(["plain", "plain", "transposed", "gapped"]),
        x_requires_grad=x_requires_grad,
        loss=rng.choice(["weighted", "weighted", "weighted", "sum"]),
        steps=steps,
    )


def _draw_step(rng: random.Random, num_ranks: int, moves: bool) -> Step:
    num_calls = rng.choice([1, 1, 2])
    training = rng.random() < 0.8
    # Activation checkpointing counts choices again in the backward pass: every step that trains has
    # one, so that all counts are doubled, or none.
    mode = "backward" if training else rng.choice(["backward", "no_grad", "inference"])
    return Step(
        shapes=tuple(_draw_shapes(rng, num_ranks) for _ in range(num_calls)),
        training=training,
        mode=mode,
        with_auxiliary=rng.random() < 0.8,
        learning_rate=rng.choice([0.1, 0.4]) if moves and mode == "backward" else 0.0,
        update_biases=rng.random() < 0.6,
    )


def _draw_shapes(rng: random.Random, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    kind, width = rng.choice(["T", "T", "BS", "B1S"]), rng.randint(1, 3)
    most = rng.choice([1, 4, 4, 8]) if rng.random() < 0.96 else 0
    shapes: list[tuple[int, ...]] = []
    for _ in range(num_ranks):
        number = 0 if rng.random() < 0.15 else rng.randint(min(1, most), most)
        if kind == "T":
            # A token by itself needs no dimension of its own.
            shapes.append(() if number == 1 and rng.random() < 0.2 else (number,))
        else:
            batch = -(-number // width)
            shapes.append((batch, width) if kind == "BS" else (batch, 1, width))
    return tuple(shapes)


def _draw_layer(
    rng: random.Random,
    num_ranks: int,
    steps: tuple[Step, ...],
    like: Layer | None = None,
    may_place: bool = True,
) -> Layer:
    num_experts = rng.choice([1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 12, 12, 13, 16])
    placed = may_place and rng.random() < 0.4
    if like is not None:
        num_experts, placed, rank_of_expert = like.num_experts, True, like.rank_of_expert
    elif placed:
        owners = rng.sample(range(num_ranks), rng.randint(1, num_ranks))
        rank_of_expert = tuple(rng.choice(owners) for _ in range(num_experts))
    else:
        rank_of_expert = _blocks(num_experts, num_ranks)
    shared = rng.choice([0, 0, 1, 4, 7])
    parts = ["router", "experts"] + ["shared"] * (shared > 0)
    frozen = [name for name in parts if rng.random() < 0.25] if rng.random() < 0.4 else []
    return Layer(
        router=_draw_router(rng, num_experts),
        intermediate=rng.choice([1, 2, 3, 4, 5, 8, 11, 16]),
        shared=shared,
        frozen=tuple(frozen),
        rank_of_expert=rank_of_expert,
        placed=placed,
        num_worst_tokens=_most_tokens(steps) + rng.randint(0, 3) if rng.random() < 0.3 else 0,
    )


def _draw_router(rng: random.Random, num_experts: int) -> dict[str, Any]:
    divisors = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
    num_groups = rng.choice(divisors) if rng.random() < 0.5 else 1
    num_kept = rng.randint(1, num_groups)
    most = num_experts // num_groups * num_kept
    return {
        "num_experts": num_experts,
        "num_topk": rng.randint(1, min(most, rng.choice([2, 4, most]))),
        "score": rng.choice(SCORES),
        "normalise": rng.random() < 0.6,
        "scale": rng.choice([1.0, 1.0, 0.3, 2.5]),
        "num_groups": num_groups,
        "num_kept_groups": num_kept,
        "auxiliary_loss": rng.choice([0.0, 0.01, 0.5]),
        "bias_rate": rng.choice([0.0, 0.01, 0.1]),
    }


def _most_tokens(steps: tuple[Step, ...]) -> int:
    """Of all ranks in one call, and at least 1."""
    most = 1
    for step in steps:
        for shapes in step.shapes:
            most = max(most, sum(num_tokens(shape) for shape in shapes))
    return most


def num_tokens(shape: tuple[int, ...]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number


def _blocks(num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """The rank of each expert when no placement is given."""
    ranks: list[int] = []
    for rank in range(num_ranks):
        ranks += [rank] * (num_experts // num_ranks + (rank < num_experts % num_ranks))
    return tuple(ranks)


def _split(rng: random.Random, num_ranks: int) -> tuple[int, ...]:
    """So many ranks on each node."""
    sizes: list[int] = []
    while sum(sizes) < num_ranks:
        sizes.append(rng.randint(1, num_ranks - sum(sizes)))
    return tuple(sizes)
