"""The file of a recorded routing: plain tensors, numbers and strings, that torch.load reads.

    {"format": "tokenyard routing", "version": 1, "every": 1, "layers": [layer, ...]}

A layer is the dict of the fields of `LayerRouting`. Each process of a run writes a *part*: a file
of the same format with the tokens of its own ranks. `join` makes one of several.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenyard.runtime.whole_file import whole_file

FORMAT, VERSION = "tokenyard routing", 1


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRouting:
    """What the tokens of one layer chose, step by step. S steps, P ranks, N tokens, top-k K."""

    name: str
    buffer: int  # the number of its Buffer, and which of that Buffer's layers it is:
    order: int  # ranks know a layer by both
    num_experts: int
    num_ranks: int  # R
    hidden: int
    dtype: str  # of rows: "bfloat16"
    ranks: Tensor  # [P] int64, ascending: whose tokens are here; all R unless it is a part
    node_of_rank: Tensor  # [R] int32
    rank_of_expert: Tensor  # [E] int32
    step: Tensor  # [S] int64, ascending: the n-th call of this layer, from 0
    num_tokens: Tensor  # [S, P] int64
    topk_idx: Tensor  # [N, K] int16 or int32, by (step, rank, token); -1 where nobody is chosen
    topk_weights: Tensor | None  # [N, K] float16

    @property
    def num_topk(self) -> int:
        return self.topk_idx.shape[1]

    @property
    def num_steps(self) -> int:
        return len(self.step)

    @property
    def is_complete(self) -> bool:
        return len(self.ranks) == self.num_ranks


def compact(num_experts: int) -> torch.dtype:
    """The dtype of ids in a file."""
    return torch.int16 if num_experts <= torch.iinfo(torch.int16).max else torch.int32


def save(path: Path, layers: Sequence[LayerRouting], every: int) -> None:
    # A tensor is saved with all of its memory, also where it is a view of a larger one.
    plain = [{key: _own(value) for key, value in vars(layer).items()} for layer in layers]
    with whole_file(path) as half:
        torch.save({"format": FORMAT, "version": VERSION, "every": every, "layers": plain}, half)


def load(*paths: str | os.PathLike[str]) -> list[LayerRouting]:
    """The layers of a recording, or of parts of one: `load("routing.pt")`.

    Where that file is missing, or older than the parts beside it (`routing.pt.part-...`, as a run
    leaves them that goes on or was killed), it is read from those. Raises ValueError, or
    FileNotFoundError.
    """
    files = [file for path in paths for file in _files_of(Path(path))]
    return join([layer for file in files for layer in load_file(file)])


def join(layers: Iterable[LayerRouting]) -> list[LayerRouting]:
    """Parts of the same layer as one, with the steps that all of them have."""
    parts: dict[tuple[int, ...], list[LayerRouting]] = {}
    for layer in layers:  # ranks number layers differently once a call failed on one of them
        key = layer.buffer, layer.order, layer.num_experts, layer.num_topk
        parts.setdefault(key, []).append(layer)
    return [_join(of_layer) for of_layer in parts.values()]


def _join(parts: list[LayerRouting]) -> LayerRouting:
    if len(parts) == 1:
        return parts[0]
    parts = sorted(parts, key=lambda part: int(part.ranks[0]))
    column: dict[int, tuple[LayerRouting, int]] = {}  # where a rank's tokens are
    for part in parts:
        for number, rank in enumerate(part.ranks.tolist()):
            column.setdefault(rank, (part, number))
    steps = sorted(set.intersection(*(set(part.step.tolist()) for part in parts)))
    begins = {id(part): begins_of(part) for part in parts}
    rows = {id(part): {step: s for s, step in enumerate(part.step.tolist())} for part in parts}
    ranks = sorted(column)
    with_weights = all(part.topk_weights is not None for part in parts)
    ids, weights = [], []
    counts = torch.zeros(len(steps), len(ranks), dtype=torch.int64, device="cpu")
    for s, step in enumerate(steps):
        for p, rank in enumerate(ranks):
            part, number = column[rank]
            row = rows[id(part)][step]
            begin, count = int(begins[id(part)][row, number]), int(part.num_tokens[row, number])
            counts[s, p] = count
            ids.append(part.topk_idx[begin : begin + count])
            if with_weights:
                assert part.topk_weights is not None
                weights.append(part.topk_weights[begin : begin + count])
    first = parts[0]
    return replace(
        first,
        ranks=torch.tensor(ranks, device="cpu"),
        step=torch.tensor(steps, dtype=torch.int64, device="cpu"),
        num_tokens=counts,
        topk_idx=torch.cat(ids) if ids else first.topk_idx[:0],
        topk_weights=(torch.cat(weights) if weights else None) if with_weights else None,
    )


def begins_of(layer: LayerRouting) -> Tensor:
    """[S, P]: the first row of topk_idx of each step and rank."""
    flat = layer.num_tokens.flatten()
    return (flat.cumsum(0) - flat).reshape(layer.num_tokens.shape)


def parts_of(path: Path, group: str = "*") -> list[Path]:
    """The parts beside a recording, those of one group of ranks or of all."""
    return sorted(path.parent.glob(f"{path.name}.part-{group}-*"))


def part_path(path: Path, group: str, rank: int, num_ranks: int) -> Path:
    return path.with_name(f"{path.name}.part-{group}-{rank}-of-{num_ranks}")


def _files_of(path: Path) -> list[Path]:
    """The file itself, or the newest run's parts, if they are newer."""
    parts = parts_of(path)
    if not parts:
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing, and there is no part of it either")
        return [path]
    newest = max(parts, key=lambda part: part.stat().st_mtime_ns)
    if path.exists() and path.stat().st_mtime_ns > newest.stat().st_mtime_ns:
        return [path]
    group = newest.name.removeprefix(f"{path.name}.part-").partition("-")[0]
    return parts_of(path, group)


def load_file(path: Path) -> list[LayerRouting]:
    """The layers in this one file, whatever lies beside it."""
    wrong = f"{path} is not a recording of tokenyard.record"
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of several kinds, by what else the file may be
        raise ValueError(wrong) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(wrong)
    if found.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {found.get('version')}, want {VERSION}: another tokenyard wrote it"
        )
    try:
        layers = [LayerRouting(**layer) for layer in found["layers"]]
        for layer in layers:
            _check(layer)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ValueError(f"{path} is a recording that is damaged: {error}") from error
    return layers


def _check(layer: LayerRouting) -> None:
    num_experts, num_ranks = layer.num_experts, layer.num_ranks
    sizes = {
        "node_of_rank": (num_ranks,),
        "rank_of_expert": (num_experts,),
        "num_tokens": (len(layer.step), len(layer.ranks)),
        "topk_idx": (int(layer.num_tokens.sum()), layer.num_topk),
    }
    if layer.topk_weights is not None:
        sizes["topk_weights"] = sizes["topk_idx"]
    for name, want in sizes.items():
        got = tuple(getattr(layer, name).shape)
        if got != want:
            raise ValueError(f"{name} of {layer.name} is {got}, want {want}")
    for name, end in {"topk_idx": num_experts, "rank_of_expert": num_ranks}.items():
        values = getattr(layer, name)
        if values.numel() and not -1 <= int(values.min()) <= int(values.max()) < end:
            raise ValueError(f"{name} of {layer.name} is not below {end}")


def _own(value: Any) -> Any:
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() != value.nbytes:
        return value.clone()
    return value
