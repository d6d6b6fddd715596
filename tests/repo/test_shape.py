"""The shape of the code: how many parameters a function takes, how deep a call goes."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard
import tokenyard.kernels.numba
from tests.cases.processes import Pools

SOURCE = Path(tokenyard.__file__).parent
MOST_PARAMETERS = 12
MOST_FRAMES = 8

# Classes whose signatures DeepEP has given.
DEEPEPS = {"Buffer", "EPHandle", "ElasticBuffer", "HybridEPBuffer"}

# Kernels that only a rank which waits calls, again and again, until a peer has come.
WAITING = {"_await_kernel"}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """The names of a file's functions, and how many parameters each takes; not DeepEP's."""

    def visit(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", "lambda")
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                given = child.args
                each = (*given.posonlyargs, *given.args, *given.kwonlyargs)
                if len(inside) != 1 or inside[0] not in DEEPEPS:
                    yield ".".join((*inside, name)), len(each)
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from visit(child, (*inside, name))
            else:
                yield from visit(child, inside)

    yield from visit(ast.parse(path.read_text()), ())


FILES = sorted(path for path in SOURCE.rglob("*.py") if "triton" not in path.parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_no_function_takes_many_parameters(path: Path) -> None:
    """DeepEP gave its classes their signatures; Triton kernels take numbers one by one."""
    many = {name: number for name, number in functions(path) if number > MOST_PARAMETERS}
    assert not many, f"want at most {MOST_PARAMETERS}: {many}"


def numba_modules() -> list[ModuleType]:
    inside = tokenyard.kernels.numba
    found = pkgutil.walk_packages(inside.__path__, f"{inside.__name__}.")
    return [importlib.import_module(one.name) for one in found]


class Counted:
    """A compiled kernel that notes how many frames there are from Buffer's method to its caller."""

    def __init__(self, name: str, kernel: Any, depths: dict[str, int]) -> None:
        self._name, self._kernel, self._depths = name, kernel, depths

    def __call__(self, *args: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        depth = 0
        while frame is not None:
            depth += 1
            if frame.f_code is tokenyard.Buffer.dispatch.__code__:
                self._depths[self._name] = max(depth, self._depths.get(self._name, 0))
                break
            frame = frame.f_back
        return self._kernel(*args)


def dispatch_depths(group: dist.ProcessGroup) -> dict[str, int]:
    """By kernel: the frames from Buffer.dispatch to the one that calls it, both counted."""
    import numba.core.dispatcher

    compiled = numba.core.dispatcher.Dispatcher
    depths: dict[str, int] = {}
    x, topk_idx = torch.ones(4, 128), torch.tensor([[0, 1]] * 4)
    given: Any = {"topk_idx": topk_idx, "topk_weights": torch.ones(4, 2), "num_experts": 2}
    with tokenyard.Buffer(group, transport="direct") as buffer:
        got: Any = buffer.dispatch(x, **given)  # compile everything, and learn how much arrives
        buffer.dispatch(x, handle=buffer.dispatch(x, **given, num_worst_tokens=16).handle)
        with pytest.MonkeyPatch.context() as patch:
            for module in numba_modules():
                for name, kernel in list(vars(module).items()):
                    if isinstance(kernel, compiled):
                        patch.setattr(module, name, Counted(name, kernel, depths))
            for worst in (0, 16):
                again: Any = buffer.dispatch(x, **given, num_worst_tokens=worst)
            buffer.dispatch(x, handle=again.handle)
        assert torch.equal(again.recv_x[:8], got.recv_x)
    return depths


@pytest.mark.processes
def test_a_dispatch_reaches_its_kernels_in_few_frames(processes: Pools) -> None:
    for depths in processes(2).run(dispatch_depths):
        for name in WAITING:
            depths.pop(name, None)
        # Who gets each token, the lists of rows, the agreement, the rows, the end.
        kernels = {"_layout_kernel", "_count_kernel", "_route_kernel", "_post_kernel"}
        kernels |= {"_scatter_kernel", "_meet_kernel", "_localise_kernel"}
        assert kernels <= set(depths)
        assert max(depths.values()) <= MOST_FRAMES, depths
