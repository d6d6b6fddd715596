"""The notes of a recording in memory: by Buffer, rank and layer, with a bound.

`stride` doubles whenever there is too much. It drops the same steps on every rank, so ranks with
different numbers of tokens still have steps in common.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tokenyard.observe.routing import file
from tokenyard.observe.routing.layer_names import Caller


class Track:
    """One layer, as one rank calls it."""

    def __init__(self, buffer: int, rank: int, order: int) -> None:
        self.buffer, self.rank, self.order = buffer, rank, order
        self.name: str | None = None
        self.num_calls = 0
        self.kept: dict[int, tuple[Tensor, Tensor | None]] = {}  # by step: ids and weights
        self.facts: dict[str, Any] = {}  # what LayerRouting says of the layer

    def describe(self, engine: Any, x: Any, num_experts: int) -> None:
        rows = x[0] if isinstance(x, tuple) else x
        self.facts = {
            "num_experts": num_experts,
            "num_ranks": engine.num_ranks,
            "hidden": rows.shape[1],
            "dtype": str(rows.dtype).removeprefix("torch."),
            "node_of_rank": torch.tensor(
                engine.topology.node_of_rank, dtype=torch.int32, device="cpu"
            ),
            "rank_of_expert": torch.tensor(
                engine.local.owners(num_experts), dtype=torch.int32, device="cpu"
            ),
        }

    def routing(self, order: int, name: str) -> file.LayerRouting:
        """This rank's part of the layer."""
        steps = sorted(self.kept)
        kept = [self.kept[step] for step in steps]
        weights = [weight for _, weight in kept if weight is not None]
        return file.LayerRouting(
            **self.facts,
            name=name,
            buffer=self.buffer,
            order=order,
            ranks=torch.tensor([self.rank], device="cpu"),
            step=torch.tensor(steps, dtype=torch.int64, device="cpu"),
            num_tokens=torch.tensor(
                [[len(ids)] for ids, _ in kept], dtype=torch.int64, device="cpu"
            ),
            topk_idx=torch.cat([ids for ids, _ in kept]),
            topk_weights=torch.cat(weights) if len(weights) == len(kept) else None,
        )


class _Seen:
    """The layers that one rank called one Buffer for."""

    def __init__(self, number: int) -> None:
        self.number = number  # of the Buffer, in the order of their first dispatch
        self.of_module: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self.of_name: dict[str | None, int] = {}
        self.calls: dict[int, int] = {}  # how often a caller came
        self.callers = itertools.count()
        self.tracks: dict[tuple[int, int, int, int], Track] = {}


class Notes:
    def __init__(self, every: int, most_steps: int, most_bytes: int, layers: int) -> None:
        self.every, self._most_steps, self._most_bytes = every, most_steps, most_bytes
        self._num_layers = layers
        self._stride = 1
        self._seen: dict[tuple[int, int], _Seen] = {}  # by Buffer and rank
        self._buffers: dict[int, int] = {}  # Buffers in the order of their first dispatch
        self.num_bytes = 0

    def track(self, engine: Any, caller: Caller, num_experts: int, num_topk: int) -> Track:
        """Where to put a dispatch of this caller. Of `layers` that look alike, they take turns."""
        buffer, rank = engine.origin.buffer, engine.rank
        number = self._buffers.setdefault(buffer, len(self._buffers))
        seen = self._seen.setdefault((buffer, rank), _Seen(number))
        if isinstance(caller.layer, nn.Module):
            who = seen.of_module.get(caller.layer)
            if who is None:
                who = seen.of_module[caller.layer] = next(seen.callers)
        else:
            who = seen.of_name.get(caller.layer)
            if who is None:
                who = seen.of_name[caller.layer] = next(seen.callers)
        calls = seen.calls.get(who, 0)
        seen.calls[who] = calls + 1
        turn = 0 if isinstance(caller.layer, str) else calls % self._num_layers
        key = who, turn, num_experts, num_topk
        if key not in seen.tracks:
            seen.tracks[key] = Track(buffer, rank, len(seen.tracks))
        return seen.tracks[key]

    def name_of_buffer(self, engine: Any) -> str:
        """The name of a layer that no module called: that of its Buffer."""
        return f"buffer {self._buffers[engine.origin.buffer]}"

    def add(self, track: Track, topk_idx: Tensor, topk_weights: Tensor | None) -> None:
        step, track.num_calls = track.num_calls, track.num_calls + 1
        if not self._keeps(step):
            return
        # Copies: the caller may write to its own afterwards.
        ids = topk_idx.detach().to("cpu", file.compact(track.facts["num_experts"]), copy=True)
        weights = None
        if topk_weights is not None:
            weights = topk_weights.detach().to("cpu", torch.float16, copy=True)
        track.kept[step] = ids, weights
        self.num_bytes += _bytes(ids, weights)
        while self.num_bytes > self._most_bytes or len(track.kept) > self._most_steps:
            if not self._drop_every_second():
                break

    def layers(self) -> list[file.LayerRouting]:
        """All that was noted, ranks of this process joined. Layers of one name get numbers."""
        found: list[file.LayerRouting] = []
        for seen in self._seen.values():
            tracks = [track for track in seen.tracks.values() if track.kept]
            names = _distinct(track.name or "" for track in tracks)
            found += [track.routing(track.order, name) for track, name in zip(tracks, names)]
        return file.join(found)

    def _keeps(self, step: int) -> bool:
        return step % (self.every * self._stride) == 0

    def _drop_every_second(self) -> bool:
        """False if nothing was left to drop."""
        dropped = False
        self._stride *= 2
        for seen in self._seen.values():
            for track in seen.tracks.values():
                for step in [step for step in track.kept if not self._keeps(step)]:
                    self.num_bytes -= _bytes(*track.kept.pop(step))
                    dropped = True
        return dropped


def _distinct(names: Iterable[str]) -> list[str]:
    """
    >>> _distinct(["moe", "moe", "other"])
    ['moe', 'moe (2)', 'other']
    """
    times: dict[str, int] = {}
    found = []
    for name in names:
        times[name] = times.get(name, 0) + 1
        found.append(name if times[name] == 1 else f"{name} ({times[name]})")
    return found


def _bytes(ids: Tensor, weights: Tensor | None) -> int:
    return ids.nbytes + (0 if weights is None else weights.nbytes)
