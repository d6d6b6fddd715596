"""Programs of the layer by chance: draw(seed) gives the same wherever it is called."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.nn.programs.optimisers import ALWAYS_CLIPPED, OPTIMISERS
from tests.nn.programs.program import (
    BY_HAND,
    Layer,
    Move,
    Program,
    Restart,
    Slots,
    Step,
    has_copies,
    num_tokens,
)

SCORES = ("softmax", "sigmoid")
MOST_PROCESSES = 4


def draw(seed: int, num_ranks: int | None = None, attempt: int = 0) -> Program:
    """On so many ranks, or on 1 to 6."""
    rng = random.Random(f"{seed} on {num_ranks}, attempt {attempt}")
    real = num_ranks is not None or rng.random() < 0.6  # processes, which torch.distributed knows
    most = num_ranks or (MOST_PROCESSES if real else 6)
    num_ranks = num_ranks or rng.randint(1, most)
    dtype = rng.choice(["float64"] * 6 + ["float32"] * 3 + ["bfloat16"])
    kernels = rng.choice(["numba", "numba", "numba", "reference"])
    # What bfloat16 rounds would change the choices of a second layer, and of a second step.
    num_layers = 1 if dtype == "bfloat16" else rng.choice([1, 1, 2])
    learns = dtype != "bfloat16" and rng.random() < 0.75
    steps = [_draw_step(rng, num_ranks, learns) for _ in range(rng.choice([1, 2, 2, 3]))]
    restart_at = 0
    if real and len(steps) > 1 and rng.random() < 0.5:
        restart_at, then = rng.randrange(1, len(steps)), rng.randint(1, most)
        steps[restart_at:] = [_draw_step(rng, then, learns) for _ in steps[restart_at:]]
    transport = "collective"  # the only one that the reference kernels can use
    if kernels == "numba":
        ways = ["direct", "direct", "ring", "collective"] + ["hierarchical"] * (not restart_at)
        transport = rng.choice(ways)
    own_buffers = num_layers > 1 and rng.random() < 0.3
    moves = rng.random() < 0.6
    layers = [_draw_layer(rng, num_ranks, tuple(steps))]
    for _ in range(num_layers - 1):
        # A Buffer that is told the placement of experts is told their number.
        like = layers[0] if (layers[0].placed or moves) and not own_buffers else None
        layers.append(_draw_layer(rng, num_ranks, tuple(steps), like, may_place=own_buffers))
    some_grad, in_all = rng.random(), max(step.num_ranks for step in steps)
    x_requires_grad = tuple(some_grad < 0.7 for _ in range(in_all))
    if some_grad > 0.85 and "router" not in layers[0].frozen:  # else all ranks must be alike
        x_requires_grad = tuple(rng.random() < 0.5 for _ in range(in_all))
    program = Program(
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
        steps=tuple(steps),
        num_models=rng.choice([1, 1, 1, 1, 2]),
    )
    program = _draw_training(rng, program, real, learns)
    if restart_at:
        program = _draw_restart(rng, program, restart_at)
    return _draw_events(rng, program, moves)


def _draw_training(rng: random.Random, program: Program, real: bool, learns: bool) -> Program:
    """Optimisers, wrappers, adapters, and layers that are called twice."""
    chosen: dict[str, Any] = {"ema": rng.random() < 0.25}
    layers = list(program.layers)
    if rng.random() < 0.15:
        layers = [replace(one, adapter=rng.randint(1, 3)) for one in layers]
        if any(has_copies(one.slots) for one in layers):
            layers = [replace(one, adapter=0) for one in layers]
    if learns and rng.random() < 0.7:
        chosen["optimiser"] = rng.choice([one for one in OPTIMISERS if one != BY_HAND])
        chosen["split"] = rng.random() < 0.3
        chosen["scaler"] = rng.random() < 0.3
        if chosen["optimiser"] in ALWAYS_CLIPPED or rng.random() < 0.5:
            chosen["clip"] = rng.choice([0.1, 0.5]), rng.choice([2.0, 2.0, float("inf"), 1.0])
    is_dense = any(one.trains("router") or one.trains("shared") for one in layers)
    if real and is_dense:
        chosen["wrapper"] = rng.choice(["none", "ddp", "ddp", "fsdp2"])
    wrapper = chosen.get("wrapper", "none")
    if wrapper != "none":
        chosen["average"] = True
    if wrapper == "fsdp2":  # torch cannot copy its parameters, nor gather them in inference mode
        chosen["ema"] = False
        chosen["steps"] = tuple(
            replace(one, mode=one.mode.replace("inference", "no_grad")) for one in program.steps
        )
    if program.dtype != "bfloat16" and rng.random() < 0.2:  # an auxiliary loss is of the last call
        layers = [replace(one, router={**one.router, "auxiliary_loss": 0.0}) for one in layers]
        places = list(range(len(layers)))
        chosen["order"] = (*places, rng.choice(places))
    # DistributedDataParallel takes one reentrant use of a parameter, and torch makes no graph there
    # without an input that requires grad.
    may_reenter = wrapper != "ddp" or "order" not in chosen
    if program.checkpoint != "none" and may_reenter and rng.random() < 0.5:
        chosen["checkpoint"] = f"reentrant {program.checkpoint}"
        chosen["x_requires_grad"] = tuple(True for _ in program.x_requires_grad)
        steps = chosen.get("steps", program.steps)
        chosen["steps"] = tuple(replace(one, with_auxiliary=False) for one in steps)
    if real and program.checkpoint == "none" and rng.random() < 0.08:
        chosen["compiled"] = rng.choice(["inside", "outside"])
    elif real and wrapper == "none" and program.num_ranks > 1 and rng.random() < 0.5:
        chosen["last"] = rng.choice(["ddp", "fsdp2"]) if is_dense else ""
    return replace(program, layers=tuple(layers), **chosen)


def _draw_restart(rng: random.Random, program: Program, step: int) -> Program:
    """Adapters cannot be saved so."""
    num_ranks = program.steps[step].num_ranks
    experts = [one.num_experts for one in program.layers]
    if program.own_buffers:
        placed = [rng.random() < 0.5 for _ in experts]
    else:  # one Buffer, which is told one number of experts
        placed = [len(set(experts)) == 1 and rng.random() < 0.5] * len(experts)
    slots = [
        _draw_slots(rng, count, num_ranks) if known else _blocks(count, num_ranks)
        for count, known in zip(experts, placed)
    ]
    if not program.own_buffers and placed[0]:
        slots = slots[:1] * len(experts)
    return replace(
        program,
        layers=tuple(replace(one, adapter=0) for one in program.layers),
        last=program.last if num_ranks > 1 else "",
        restart=Restart(step=step, num_ranks=num_ranks, slots=tuple(slots), placed=tuple(placed)),
    )


def _draw_events(rng: random.Random, program: Program, moves: bool) -> Program:
    """What happens before and in each step: moves, overflows, and inputs to refuse."""
    count = len(program.layers) if program.own_buffers else 1
    adapted = any(one.adapter for one in program.layers)
    holders = program.num_models + program.ema
    alike = program.own_buffers or len({one.num_experts for one in program.layers}) == 1
    now = [one.slots for one in program.layers[:count]]  # by Buffer
    steps = []
    for number, step in enumerate(program.steps):
        if program.restart is not None and number == program.restart.step:
            now = list(program.restart.slots[:count])
        move = None
        if moves and alike and rng.random() < 0.6:
            experts = [one.num_experts for one in program.layers[:count]]
            then = [_draw_slots(rng, one, step.num_ranks, not adapted) for one in experts]
            kinds = ["count"] + ["differ"] * (step.num_ranks > 1)
            refused = rng.choice(kinds) if rng.random() < 0.2 else ""
            if adapted:
                refused = "adapter"
            if refused == "count":
                counts = [one + rng.choice([1, -1] if one > 1 else [1]) for one in experts]
                then = [_draw_slots(rng, one, step.num_ranks) for one in counts]
            if refused == "differ" and any(one == one[::-1] for one in then):
                refused = ""
            how = "together"
            if not program.own_buffers and not refused and then != now and rng.random() < 0.5:
                how = rng.choice(["by hand"] + ["behind"] * 2 * (holders > 1))
            move = Move(slots=tuple(then), how=how, refused=refused)
            now = now if refused else then
        overflow = None
        if program.scaler and step.learning_rate and rng.random() < 0.3:
            overflow = rng.randrange(step.num_ranks), rng.choice(["experts", "experts", "dense"])
        steps.append(
            replace(
                step,
                move=move,
                overflow=overflow,
                model=rng.randrange(program.num_models),
                wide_rank=rng.randrange(step.num_ranks) if rng.random() < 0.05 else -1,
            )
        )
    # fully_shard gathers parameters before a layer can refuse it: of as many experts on each rank.
    alone = [_blocks(one.num_experts, step.num_ranks) for one in program.layers[count:]]
    even = all(len(set(map(len, slots))) == 1 for slots in (*now, *([] if alike else alone)))
    last = "" if program.last == "fsdp2" and not even else program.last
    copies, plain = any(map(has_copies, now)), (program.wrapper, program.compiled) == ("none",) * 2
    if not last and plain and copies and not adapted and rng.random() < 0.5:
        last = "adapter"
    return replace(program, steps=tuple(steps), last=last)


def _draw_slots(rng: random.Random, num_experts: int, num_ranks: int, copies: bool = True) -> Slots:
    """Ranks may have none, and an expert several copies, on one rank too."""
    owners = rng.sample(range(num_ranks), rng.randint(1, num_ranks))
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in range(num_experts):
        ranks[rng.choice(owners)].append(expert)
    if copies and rng.random() < 0.5:
        for _ in range(rng.randint(1, 6)):
            ranks[rng.randrange(num_ranks)].append(rng.randrange(num_experts))
        for held in ranks:
            rng.shuffle(held)
    return tuple(map(tuple, ranks))


def _draw_step(rng: random.Random, num_ranks: int, learns: bool) -> Step:
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
        learning_rate=rng.choice([0.1, 0.4]) if learns and mode == "backward" else 0.0,
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
        num_experts, placed, slots = like.num_experts, like.placed, like.slots
    elif placed:
        slots = _draw_slots(rng, num_experts, num_ranks)
    else:
        slots = _blocks(num_experts, num_ranks)
    shared = rng.choice([0, 0, 1, 4, 7])
    parts = ["router", "experts"] + ["shared"] * (shared > 0)
    frozen = [name for name in parts if rng.random() < 0.25] if rng.random() < 0.4 else []
    return Layer(
        router=_draw_router(rng, num_experts),
        intermediate=rng.choice([1, 2, 3, 4, 5, 8, 11, 16]),
        shared=shared,
        frozen=tuple(frozen),
        slots=slots,
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


def _blocks(num_experts: int, num_ranks: int) -> Slots:
    """The experts of each rank when no placement is given."""
    slots, first = [], 0
    for rank in range(num_ranks):
        count = num_experts // num_ranks + (rank < num_experts % num_ranks)
        slots.append(tuple(range(first, first + count)))
        first += count
    return tuple(slots)


def _split(rng: random.Random, num_ranks: int) -> tuple[int, ...]:
    """So many ranks on each node."""
    sizes: list[int] = []
    while sum(sizes) < num_ranks:
        sizes.append(rng.randint(1, num_ranks - sum(sizes)))
    return tuple(sizes)
