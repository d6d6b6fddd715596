"""Copies of a tree, in which faults are planted and tests run."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.faults.fault import Fault, NoPlace
from tools.faults.stages import Stage, file_of

SOURCE = "src/tokenyard"
LIMIT = 600.0  # seconds of a stage
TEST_LIMIT = 150  # seconds of a test, unless it has its own
PATIENCE = 20  # seconds that ranks wait for one that shows no life
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - (.*))?$", re.MULTILINE)
# Made by .ci/vllm-env. (absolute(): the link to Python must not be followed out of it.)
_VLLM = Path(os.environ.get("TOKENYARD_CI_VLLM_VENV", ".ci/vllm-venv"), "bin/python").absolute()
_NO_TESTS = 5  # pytest's status


@dataclass(frozen=True)
class Seen:
    """What a run of pytest has shown: "" if all is well."""

    result: str = ""
    test: str = ""  # the first that failed, if that is known


class Copy:
    """A copy of a tree, in which faults are planted and tests run."""

    def __init__(self, tree: Path, folder: Path, limit: float = LIMIT, workers: int = 2) -> None:
        self.folder, self._limit, self._workers = folder, limit, workers
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        told = subprocess.run(listed, cwd=tree, capture_output=True, check=True).stdout
        names = told.split(b"\0")
        kernels = (tree / "src").rglob("*.nbc")  # compiled before: their names tell of what
        for path in [*(tree / os.fsdecode(name) for name in names if name), *kernels]:
            if path.is_file():
                target = folder / path.relative_to(tree)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)

    def check(self) -> None:
        """That tests import the copy, and nothing that is installed."""
        asked = [sys.executable, "-c", "import tokenyard; print(tokenyard.__file__)"]
        there = subprocess.run(
            asked, cwd=self.folder, env=self._environment(), capture_output=True, check=True
        )
        found = Path(os.fsdecode(there.stdout).strip())
        assert found.is_relative_to(self.folder), f"tests would import {found}"

    @contextlib.contextmanager
    def planted(self, fault: Fault, kernels: Path) -> Iterator[dict[str, str]]:
        """Inside, the copy has the fault. Gives settings for its tests: kernels that follow from
        the fault are kept in that folder. Raises NoPlace.
        """
        path = self.folder / SOURCE / fault.path
        clean, times = path.read_bytes(), path.stat()
        faulty = fault.plant(clean.decode())
        try:
            path.write_text(faulty)
            # Python takes a file of the same second and size for the one that it knows.
            later = times.st_mtime + random.randrange(10, 1 << 20)
            os.utime(path, (later, later))
            yield {"NUMBA_CACHE_DIR": str(kernels)} if self._is_compiled(fault.path) else {}
        finally:
            path.write_bytes(clean)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def run(
        self,
        stage: Stage,
        settings: dict[str, str],
        tests: Sequence[str] = (),
        but: Sequence[str] = (),
    ) -> Seen:
        """Run a stage, or only these tests of it, or all `but` some, until the first that fails."""
        paths = list(tests) or [one for one in stage.paths if (self.folder / file_of(one)).exists()]
        if not paths:
            return Seen()
        python = str(_VLLM if stage.needs_vllm else sys.executable)
        if not Path(python).exists():
            raise NoPlace(f"{stage} needs vLLM, want its environment at {_VLLM.parents[1]}")
        command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths]
        command += ["-m", stage.marks, "-n", str(self._workers)]
        # By a thread: a lock that nobody gives back cannot be left by a signal.
        command += [f"--timeout={TEST_LIMIT}", "--timeout-method=thread"]
        command += [f"--deselect={one}" for one in but]
        if "not processes" not in stage.marks:
            command.append("--dist=loadfile")
        if stage.interprets_triton:
            settings = settings | {"TRITON_INTERPRET": "1"}
        status, said = self._run(command, settings)
        if status in (0, _NO_TESTS):
            return Seen()
        failed = _FAILED.search(said)
        if status is None:
            return Seen(f"hung: more than {self._limit:g} s", failed[1] if failed else "")
        if failed is None:
            return Seen("hung" if "+ Timeout +" in said else f"crashed: pytest ended with {status}")
        return Seen("hung" if "Timeout" in (failed[2] or "") else "failed", failed[1])

    def _run(self, command: list[str], settings: dict[str, str]) -> tuple[int | None, str]:
        """The status, None if there is none in time, and what was printed. A file takes that: a
        pipe would wait for all who hold it, ranks in other sessions too.
        """
        environment = self._environment() | settings
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            child = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ended = False
            try:
                ended = _ends(child.pid, self._limit)
            finally:
                os.killpg(child.pid, signal.SIGKILL)  # and ranks that it has left behind
                status = child.wait()
            said.seek(0)
            return status if ended else None, said.read()

    def _environment(self) -> dict[str, str]:
        kept = {key: one for key, one in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        own = {"PYTHONPATH": str(self.folder / "src"), "TOKENYARD_TIMEOUT": str(PATIENCE)}
        return kept | own

    def _is_compiled(self, path: str) -> bool:
        """Whether kernels follow from this file: to save them would delete those of the copy."""
        caching = self.folder / SOURCE / "kernels/numba/caching.py"
        listed = caching.read_text() if caching.exists() else ""
        return path.startswith("kernels/numba/") or f'"{path}"' in listed


def _ends(pid: int, limit: float) -> bool:
    """Whether a child ends within so many seconds. Nobody else gets its number before it is waited
    for, which this leaves to the caller.
    """
    deadline = time.monotonic() + limit
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
