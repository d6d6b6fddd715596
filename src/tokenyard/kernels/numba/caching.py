"""`njit` whose cache on disk sees every file that a kernel is made of.

Numba's own cache looks only at the file that holds the function, though compiled code follows from
other files too. Here the name of an entry follows from the content of all files that kernels may
use, so that no entry is ever stale. Entries of other contents are deleted when one is saved.

Processes that want one kernel at the same time compile it once (`compile_lock`), and those that
wait compile what will be wanted next (`expect`). Ranks that wait for this one meanwhile know that
it is busy (`runtime.busy`). Who compiles says so (`progress`).

Where Numba finds no folder that it can write, kernels are kept in a folder of the user's own among
the temporary files, or else nowhere. A line in the log says so, once. Kernels that lie in the
package or in NUMBA_CACHE_DIR are found there, written or not: an image may come with its kernels.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numba
from numba.core import caching, sigutils
from numba.core.compiler_lock import global_compiler_lock
from numba.core.types.misc import unliteral

from tokenyard.kernels.numba.compile_lock import is_taken, turn
from tokenyard.kernels.numba.progress import Progress
from tokenyard.runtime.busy import busy
from tokenyard.runtime.interrupts import deferred, look

_log = logging.getLogger("tokenyard")
_HERE = Path(__file__).parent

# Of the package, outside this folder: what the files here import, and what those import.
_ELSEWHERE = (
    "errors.py",
    "kernels/base.py",
    "kernels/rearrange_plan.py",
    "runtime/busy.py",
    "runtime/interrupts.py",
    "runtime/limits.py",
    "runtime/memory.py",
    "runtime/pool.py",
    "runtime/threads.py",
    "runtime/variables.py",
    "types.py",
    "wire/balance.py",
    "wire/call.py",
    "wire/columns.py",
    "wire/counters.py",
    "wire/fp8.py",
    "wire/int64s.py",
    "wire/logfmt.py",
    "wire/message.py",
    "wire/nodes_table.py",
    "wire/rings.py",
    "wire/signals.py",
    "wire/verdicts.py",
)
_ADVICE = "set NUMBA_CACHE_DIR to a folder that can be written"


def sources() -> list[Path]:
    """All files that compiled code may follow from."""
    return [*sorted(_HERE.rglob("*.py")), *(_HERE.parents[1] / name for name in _ELSEWHERE)]


def _digest() -> str | None:
    """A digest of all sources; None if there are none to read, as in an archive."""
    digest = hashlib.sha256()
    try:
        for path in sources():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    except OSError:
        return None
    return digest.hexdigest()[:16]


# Read before any kernel is defined: a file that is replaced meanwhile must not lend its name to
# code that was made of the one before.
_DIGEST = _digest()
_progress = Progress()
_expected: list[tuple[Any, tuple[Any, ...]]] = []
_turns = 0  # that this process has: of a kernel, and of those that it calls


def njit(*, cache: bool = False, **options: Any) -> Any:
    """numba.njit, with this cache if any."""
    jit = numba.njit(**options)

    def compiled(function: Any) -> Any:
        kernel = jit(function)
        if cache:
            kernel._cache = _cache_of(function)
            kernel.compile = partial(_compile, kernel, kernel.compile)
        return kernel

    return compiled


def _compile(kernel: Any, compile: Callable[[Any], Any], signature: Any) -> Any:
    """Numba's compile: load a kernel, or compile it, unless that has happened already.

    For a call with constants Numba would compile a function for each of their values. Once for
    their type is enough: LLVM knows the values where it takes the function in.

    Threads that want a kernel at once take turns at Numba's own lock. Inside `compile` each of them
    would time the lock, and so hear of every turn of all others: 512 virtual ranks spent half of
    their first call on that.
    """
    arguments, returned = sigutils.normalize_signature(signature)
    arguments = tuple(unliteral(argument) for argument in arguments)
    signature = arguments if returned is None else returned(*arguments)
    with deferred(), global_compiler_lock:
        if arguments in kernel.overloads:
            return kernel.overloads[arguments].entry_point
        look()
        with _progress.making(kernel):
            made = _load_or_compile(kernel, compile, signature)
        look()
    return made


def _load_or_compile(kernel: Any, compile: Callable[[Any], Any], signature: Any) -> Any:
    global _turns
    if not isinstance(kernel._cache, _Cache):
        with busy(_progress):
            return compile(signature)
    entry = kernel._cache.entry(signature, kernel.targetctx)
    if entry.exists():
        return compile(signature)
    with busy(_progress), turn(f"{entry.path}.turn", entry.exists, _compile_expected):
        _turns += 1
        try:
            return compile(signature)
        finally:
            _turns -= 1


def expect(*wanted: tuple[Any, tuple[Any, ...]]) -> None:
    """Kernels and signatures that calls to come will want, in this order. A process that waits for
    another, which compiles, compiles them meanwhile.
    """
    _expected.extend(one for one in wanted if one not in _expected)


def _compile_expected() -> bool:
    """Compile what was expected first, and nobody has or makes; False if there is no such thing.

    Not while this process has a turn: another may wait for what is made in it, and make what this
    would wait for.
    """
    while _expected and not _turns:
        kernel, signature = _expected.pop(0)
        if signature in kernel.overloads or not isinstance(kernel._cache, _Cache):
            continue
        entry = kernel._cache.entry(signature, kernel.targetctx)
        if not entry.exists() and not is_taken(f"{entry.path}.turn"):
            kernel.compile(signature)
            return True
    return False


def _cache_of(function: Any) -> Any:
    if _DIGEST is None:
        _warn("tokenyard's source files cannot be read: kernels are compiled anew in every process")
        return caching.NullCache()
    return _Cache(function)


@cache
def _warn(text: str) -> None:
    _log.warning(text)


def _folders(file: Path) -> Iterator[Path]:
    """All folders in which kernels of a file may lie."""
    yield file.parent / "__pycache__"
    if numba.config.CACHE_DIR:
        place = caching._CacheLocator.get_suitable_cache_subpath(str(file))
        yield Path(numba.config.CACHE_DIR, place)


class _OwnFolder(caching._SourceFileBackedLocatorMixin, caching._CacheLocator):
    """A folder that only this user can read and write. What lies there is loaded as code."""

    def __init__(self, py_func: Any, py_file: Any) -> None:
        self._py_file, self._lineno = py_file, py_func.__code__.co_firstlineno
        self._own = Path(tempfile.gettempdir(), f"tokenyard-numba-{os.geteuid()}")

    def get_cache_path(self) -> Any:
        return str(self._own / self.get_suitable_cache_subpath(self._py_file))

    def ensure_cache_path(self) -> None:
        with suppress(FileExistsError):
            self._own.mkdir(mode=0o700)
        found = self._own.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not is_own or found.st_mode & 0o077:
            raise PermissionError(f"{self._own} is open to others")
        super().ensure_cache_path()

    @classmethod
    def from_function(cls, py_func: Any, py_file: Any) -> Any:
        if not hasattr(os, "geteuid"):  # Windows, where each user has temporary files of their own
            return None
        try:
            self = super().from_function(py_func, py_file)
        except OSError:  # there is no folder for temporary files
            return None
        if self is not None:
            _warn(f"no better folder: compiled kernels are kept in {self._own}; {_ADVICE}")
        return self


class _Nowhere(caching.InTreeCacheLocator):
    """The package's own folder, where nothing can be written."""

    @classmethod
    def from_function(cls, py_func: Any, py_file: Any) -> Any:
        return cls(py_func, py_file)


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = (*caching.CompileResultCacheImpl._locator_classes, _OwnFolder, _Nowhere)


class _Entry(NamedTuple):
    """Where the code of one signature is kept, or will be."""

    path: str
    elsewhere: tuple[str, ...]  # where it is read, too, if it is not there

    def exists(self) -> bool:
        return self.find() is not None

    def find(self) -> str | None:
        return next(filter(os.path.exists, (self.path, *self.elsewhere)), None)


class _Entries(caching.IndexDataCacheFile):
    """A file for each signature and machine, whose name follows from all that it was made of.

    Numba numbers files, and an index says which is which: two ranks that save different signatures
    at the same time may take the same number, and one finds the other's code afterwards.
    """

    def __init__(self, folder: str, function: str, elsewhere: Sequence[str]) -> None:
        super().__init__(folder, function, _DIGEST)
        self._elsewhere = elsewhere  # folders that are read only
        self._function = f"{function}-"
        self._fresh = f"{function}-{_DIGEST}-"

    def entry(self, key: Any) -> _Entry:
        name = self._name(key)
        return _Entry(
            self._data_path(name), tuple(os.path.join(one, name) for one in self._elsewhere)
        )

    def load(self, key: Any) -> Any:
        found = self.entry(key).find()
        if found is not None:
            with suppress(FileNotFoundError):
                return self._load_data(found)  # a whole path, which it joins to its folder
        return None

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name(key), data)
        for name in os.listdir(self._cache_path):
            if name.startswith(self._function) and not name.startswith(self._fresh):
                with suppress(FileNotFoundError):
                    os.unlink(self._data_path(name))

    def _name(self, key: Any) -> str:
        made_by = sys.version, numba.__version__, llvmlite.__version__
        digest = hashlib.sha256(repr((made_by, key)).encode()).hexdigest()
        return f"{self._fresh}{digest[:32]}.nbc"


class _Cache(caching.FunctionCache):
    """A folder that turns out to be full, or a torn file, costs a compilation, not the call."""

    _impl_class = _Implementation

    def __init__(self, py_func: Any) -> None:
        super().__init__(py_func)
        file = Path(py_func.__code__.co_filename)
        self._cache_file = _Entries(
            self.cache_path,
            f"{file.stem}.{py_func.__qualname__}",
            [str(folder) for folder in _folders(file) if str(folder) != self.cache_path],
        )

    def entry(self, signature: Any, target_context: Any) -> _Entry:
        return self._cache_file.entry(self._index_key(signature, target_context.codegen()))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # a torn pickle raises anything
            _log.warning("a compiled kernel cannot be read, and is compiled anew: %r", error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            if isinstance(self._impl.locator, _Nowhere):
                what = "no folder can be written: kernels are compiled anew in every process"
            else:
                what = f"compiled kernels cannot be kept: {error}"
            _warn(f"{what}; {_ADVICE}")


def folder_in_use() -> tuple[str | None, str]:
    """The folder in which kernels that are compiled now are kept, or None, and why that one."""
    cache = _cache_of(folder_in_use)
    if not isinstance(cache, _Cache):
        return None, "tokenyard's source files cannot be read"
    folder = cache.cache_path
    if isinstance(cache._impl.locator, _Nowhere):
        return None, "no folder can be written"
    if isinstance(cache._impl.locator, _OwnFolder):
        return folder, "no better folder can be written"
    if folder == str(_HERE / "__pycache__"):
        return folder, "beside the kernels, in the package"
    if numba.config.CACHE_DIR:
        return numba.config.CACHE_DIR, "which NUMBA_CACHE_DIR names"
    return folder, "the user's own, since the package cannot be written"
