"""tokenyard.record: note what tokens choose while a model runs, and write it to one file.

    with tokenyard.record("routing.pt"):
        train()  # every dispatch of every Buffer of this process is noted

For programs that you cannot edit, such as a server, `TOKENYARD_RECORD=routing.pt` in the
environment does the same from the first Buffer to the end of the process, and writes what there is
every ten seconds; `TOKENYARD_RECORD_EVERY=10` notes every tenth step. `tokenyard inspect
routing.pt` shows it.

A dispatch along a handle repeats a routing, and so does one in a backward pass (activation
checkpointing): they are not noted.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from tokenyard.observe.routing import file
from tokenyard.observe.routing.layer_names import Caller, find_caller, name_of
from tokenyard.observe.routing.notes import Notes
from tokenyard.runtime import observers, variables
from tokenyard.runtime.locks import alone_with

_log = logging.getLogger("tokenyard")
_SECONDS = 10.0  # between two writings of a recording that the environment asked for
_MOST_BYTES = 256 << 20

# The recording that is on, if one is.
active: Recording | None = None
_changing = threading.Lock()
_layer: ContextVar[str | None] = ContextVar("tokenyard_layer", default=None)
_is_paused: ContextVar[bool] = ContextVar("tokenyard_record_paused", default=False)
_asked_environment = False


class Recording:
    """Notes of this process's Buffers. Made by `record`."""

    def __init__(self, path: Path, options: dict[str, Any], weights: bool, notes: Notes) -> None:
        self.path, self.options = path, options
        self.users = 0  # threads that are inside the context: virtual ranks
        self._weights, self._notes = weights, notes
        self._lock = threading.Lock()
        self._started = time.time_ns()
        self._is_new = False  # are there notes that no file has?
        self._has_failed = False

    @contextlib.contextmanager
    def layer(self, name: str) -> Iterator[None]:
        """Dispatches inside, on this thread, are of the layer that you name. Needed where layers
        are no modules of torch; of a module the name is found.
        """
        token = _layer.set(name)
        try:
            yield
        finally:
            _layer.reset(token)

    @property
    def num_bytes(self) -> int:
        """Bytes of the notes in memory."""
        return self._notes.num_bytes

    def note(
        self, engine: Any, x: Any, topk_idx: Any, topk_weights: Any, num_experts: int | None
    ) -> None:
        """A dispatch has begun well on this rank. Never raises: ranks wait for each other."""
        if topk_idx is None or num_experts is None or _is_paused.get():
            return
        if torch._C._current_graph_task_id() != -1:  # a backward pass repeats a forward call
            return
        try:
            named = _layer.get()
            caller = Caller(named) if named is not None else find_caller()
            weights = topk_weights if self._weights else None
            with self._lock:
                track = self._notes.track(engine, caller, num_experts, topk_idx.shape[1])
                if track.name is None:
                    track.name = name_of(caller) or self._notes.name_of_buffer(engine)
                    track.describe(engine, x, num_experts)
                self._notes.add(track, topk_idx, weights)
                self._is_new = True
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                _log.warning("a dispatch could not be noted in %s", self.path, exc_info=True)

    def write_part(self) -> None:
        """What was noted so far, where a later writing replaces it."""
        with self._lock:
            if not self._is_new:
                return
            self._is_new = False
            layers = self._notes.layers()
        file.save(self._part(layers), layers, self._notes.every)

    def finish(self) -> None:
        """Write the file. The last process of a run to do so joins the parts of all."""
        with self._lock:
            layers = self._notes.layers()
        if not layers:
            _log.warning("no dispatch was noted, so there is no %s", self.path)
            return
        with alone_with(self.path.parent):
            parts = [self._part(layers)]
            if not all(layer.is_complete for layer in layers):
                file.save(parts[0], layers, self._notes.every)
                parts = file.parts_of(self.path, _group(layers))
                if len(parts) < layers[0].num_ranks:
                    return  # others are still to come
                layers = file.join(layer for part in parts for layer in file.load_file(part))
            # Another group of the same run, with a Buffer of its own, may have been here before.
            if self.path.exists() and self.path.stat().st_mtime_ns > self._started:
                with contextlib.suppress(ValueError):
                    layers = file.join([*layers, *file.load_file(self.path)])
            file.save(self.path, layers, self._notes.every)
            for part in parts:
                part.unlink(missing_ok=True)

    def _part(self, layers: list[file.LayerRouting]) -> Path:
        first = layers[0]
        return file.part_path(self.path, _group(layers), int(first.ranks[0]), first.num_ranks)


@contextlib.contextmanager
def record(
    path: str | os.PathLike[str],
    *,
    weights: bool = False,
    every: int = 1,
    most_steps: int = 1000,
    most_bytes: int = _MOST_BYTES,
    layers: int = 1,
) -> Iterator[Recording]:
    """Note the routing of every dispatch of this process's Buffers, and write it to `path`.

        weights     note topk_weights too, as float16
        every       note every so many steps; a step is a call of a layer
        most_steps  of a layer that are kept: when there are more, every second one is dropped, and
                    from then on only every second one is noted
        most_bytes  in memory, all layers together: bounded in the same way
        layers      so many layers take turns in what looks like one: under torch.compile of a whole
                    model, or in plain functions that share a Buffer

    A layer is named as the module that calls the Buffer, as `Recording.layer` says, or after its
    Buffer. Every rank records to the same path. Each process writes a part; the last joins them to
    one file. Ranks of several machines that share no folder leave parts, which
    `tokenyard.routing.load` and `tokenyard inspect` take together.

    A dispatch that another rank refuses after it began here is noted here and not there: later
    steps of that layer are then one apart.
    """
    options = {
        "weights": weights,
        "every": every,
        "most_steps": most_steps,
        "most_bytes": most_bytes,
        "layers": layers,
    }
    recording = _enter(Path(path), options)
    try:
        yield recording
    finally:
        _leave(recording)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Dispatches inside, on this thread, are not noted: they only warm something up."""
    token = _is_paused.set(True)
    try:
        yield
    finally:
        _is_paused.reset(token)


def begin_from_environment() -> None:
    """The recording that TOKENYARD_RECORD asks for, when the first Buffer is opened."""
    global _asked_environment
    if _asked_environment:
        return
    _asked_environment = True
    path = variables.read("TOKENYARD_RECORD")
    if not path:
        return
    try:
        every = variables.number("TOKENYARD_RECORD_EVERY", 1)
        recording = _enter(Path(path), {"every": every})
    except BaseException:
        _asked_environment = False  # the next Buffer raises too
        raise
    atexit.register(_leave, recording)
    threading.Thread(
        target=_keep_writing, args=(recording,), daemon=True, name="tokenyard-record"
    ).start()


def _keep_writing(recording: Recording) -> None:
    wait = _SECONDS
    while recording is active:
        time.sleep(wait)
        begin = time.monotonic()
        try:
            recording.write_part()
        except OSError as error:
            _log.warning("%s cannot be written: %s", recording.path, error)
            return
        wait = max(_SECONDS, 20 * (time.monotonic() - begin))  # at most a twentieth of the time


def _enter(path: Path, options: dict[str, Any]) -> Recording:
    global active
    path = path.absolute()
    with _changing:
        if active is not None:
            if (active.path, active.options) != (path, options):
                raise ValueError(
                    f"a recording to {active.path} is on already, want one at a time in a process"
                )
            active.users += 1
            return active
        made = _make(path, options)
        made.users = 1
        active = made
        observers.add("dispatched", made.note)
        return made


def _leave(recording: Recording) -> None:
    global active
    with _changing:
        recording.users -= 1
        if recording.users:
            return
        if active is recording:
            active = None
            observers.remove("dispatched", recording.note)
    recording.finish()


def _make(path: Path, options: dict[str, Any]) -> Recording:
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder, want one that the recording can be put in")
    if path.is_dir():
        raise ValueError(f"{path} is a folder, want the name of a file")
    limits = {"every": 1, "most_steps": 1000, "most_bytes": _MOST_BYTES, "layers": 1}
    for name in limits:
        limits[name] = options.get(name, limits[name])
        if type(limits[name]) is not int or limits[name] < 1:
            raise ValueError(f"{name} is {limits[name]!r}, want a number of at least 1")
    return Recording(path, options, bool(options.get("weights")), Notes(**limits))


def _group(layers: list[file.LayerRouting]) -> str:
    """What ranks of one run have in common, in the names of their parts."""
    return f"{layers[0].buffer:x}"
