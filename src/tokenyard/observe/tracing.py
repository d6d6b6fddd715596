"""One file that shows what all ranks did, on one timeline, as Chrome and Perfetto read it.

    with tokenyard.trace("run.json"):
        ...

Every rank names the same file, or TOKENYARD_TRACE does, from the first Buffer to the last that is
closed. Each process leaves its part beside the file, and makes the file anew of all parts of the
run that lie there. When every rank's part is in, the parts go. Ranks of other machines leave theirs
there; `merge_traces` makes one file of them. It also takes what a run left whose ranks were killed.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenyard.runtime import recorder, variables
from tokenyard.runtime.chrome import chrome_trace, rows_between
from tokenyard.runtime.locks import alone_with
from tokenyard.runtime.recorder import Recorder, Track
from tokenyard.runtime.whole_file import whole_file
from tokenyard.wire.counters import HEAD

_log = logging.getLogger("tokenyard")
_started: dict[str, Recorder] = {}  # by TOKENYARD_TRACE


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record calls, moves and waits of all Buffers of this process, and write them to a file.

    All ranks of a machine name the same file. Local: ranks exchange nothing. A process has one
    trace at a time: who begins another meanwhile joins it, and the last to end writes the file.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"path is {str(path)!r}, want a file in a folder that exists")
    recorder.start()
    try:
        yield
    finally:
        recorder.stop(lambda made: _finish(made, path))


def _finish(made: Recorder, path: Path) -> None:
    try:
        write(made, path)
    finally:  # Buffers may hold their tracks until a next trace
        for track in made.tracks.values():
            track.calls, track.moves, track.waits = [], [], []


def merge_traces(path: str | os.PathLike[str], parts: Sequence[str | os.PathLike[str]]) -> None:
    """Make one trace of the parts (`run.json.*.part`) that processes have left.

    A trace's own name (`run.json`) stands for all parts that lie beside it.
    """
    if not parts:
        raise ValueError("parts is empty, want files that a trace has left: <file>.*.part")
    merge_parts(Path(path), read_parts(parts))


def read_parts(paths: Sequence[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """Parts by their names, or those beside a trace by its name. Each is read once."""
    found = {one.resolve(): one for path in paths for one in _beside(Path(path)) or [Path(path)]}
    return [_read(one) for one in found.values()]


def merge_parts(path: Path, parts: Sequence[dict[str, Any]]) -> None:
    _write_json(path, chrome_trace(parts))


def missing_ranks(parts: Iterable[dict[str, Any]]) -> set[int]:
    """Ranks of any Buffer that have left none of these parts."""
    tracks = [track for part in parts for track in part["tracks"]]
    seen = {(track["buffer"], track["rank"]) for track in tracks}
    everyone = {(track["buffer"], rank) for track in tracks for rank in range(track["num_ranks"])}
    return {rank for _, rank in everyone - seen}


def begin_from_environment() -> None:
    """Where a Buffer is opened: begin the trace that TOKENYARD_TRACE names, unless it is on."""
    path = variables.read("TOKENYARD_TRACE")
    if path and path not in _started:
        _started[path] = recorder.start()


def write_for_environment() -> None:
    """Where a Buffer is closed: write what TOKENYARD_TRACE asks for so far. It goes on."""
    for path, made in _started.items():
        try:
            write(made, Path(path))
        except (OSError, ValueError) as error:  # the caller closes a Buffer, and has other worries
            _log.warning("%s cannot be written: %s", path, error)


def write(made: Recorder, path: Path) -> None:
    """Leave this process's part, and make the file of all parts of the run that are there."""
    tracks = [_plain(track) for track in made.tracks.values()]
    part = {"machine": _boot(), "pid": os.getpid(), "host": socket.gethostname(), "tracks": tracks}
    own = Path(f"{path}.{part['host']}-{part['pid']}.part")
    with _alone(path) as lock:
        _write_json(own, part)
        found = _of_run({one: _read(one) for one in _beside(path)}, own)
        merge_parts(path, [found[one] for one in sorted(found)])
        if not missing_ranks(found.values()):
            for one in (*found, lock):
                one.unlink(missing_ok=True)


def _plain(track: Track) -> dict[str, Any]:
    """What a Buffer's calls were, in values that json can write."""
    track.drain()
    size = (track.first.shape[1] - HEAD) // 3
    before = track.first[:, HEAD:].sum(0).reshape(3, size).tolist()
    calls = []
    for span in track.calls:
        assert span.totals is not None
        after = span.totals[:, HEAD:].sum(0).reshape(3, size).tolist()
        moved = rows_between(before, after)
        calls.append([span.stage, span.begin, span.end, span.number, *moved])
        before = after
    return {
        "buffer": track.buffer,
        "rank": track.counted.rank,
        "num_ranks": size,
        "ahead": int(track.clocks_R[0]),
        "calls": calls,
        "moves": [[span.stage, span.begin, span.end] for span in track.moves],
        "waits": track.waits,
    }


def _of_run(found: dict[Path, dict[str, Any]], own: Path) -> dict[Path, dict[str, Any]]:
    """The parts that share a Buffer with this process's, and those that share one with them."""
    kept, buffers = {own}, {track["buffer"] for track in found[own]["tracks"]}
    while True:
        more = {
            path
            for path, part in found.items()
            if path not in kept and buffers & {track["buffer"] for track in part["tracks"]}
        }
        if not more:
            return {path: found[path] for path in kept}
        kept |= more
        buffers |= {track["buffer"] for path in more for track in found[path]["tracks"]}


def _beside(path: Path) -> list[Path]:
    """The parts of a trace."""
    return [Path(one) for one in sorted(glob.glob(f"{glob.escape(str(path))}.*.part"))]


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """One process at a time writes beside this file."""
    lock = Path(f"{path}.lock")
    with alone_with(lock):
        yield lock


def _read(path: Path) -> dict[str, Any]:
    try:
        part = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no part of a trace, want <file>.*.part: {error}") from error
    if not isinstance(part, dict) or "tracks" not in part:
        made = isinstance(part, dict) and "traceEvents" in part
        why = "it was made of parts, which are gone" if made else "it has no tracks"
        raise ValueError(f"{path} is no part of a trace, want <file>.*.part: {why}")
    return part


def _write_json(path: Path, what: Any) -> None:
    with whole_file(path) as half:
        half.write_text(json.dumps(what, separators=(",", ":")))


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
