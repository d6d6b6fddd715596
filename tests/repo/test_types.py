"""mypy does not read compiled functions, which numba and triton type. All others have types."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "src" / "tokenyard" / "kernels"

# Of numba and triton, and of our own: a function with one of these is compiled.
COMPILERS = ("njit", "jit", "intrinsic", "overload", "register_jitable", "extending")


def functions(node: ast.AST, is_compiled: bool = False) -> Iterator[ast.FunctionDef]:
    """Those that Python runs. What is defined inside a compiled function is compiled too, and so is
    what an intrinsic returns.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            named = [ast.unparse(one) for one in child.decorator_list]
            compiled = is_compiled or any(word in name for name in named for word in COMPILERS)
            if not compiled:
                yield child
            yield from functions(child, compiled)
        else:
            yield from functions(child, is_compiled)


def lacks_types(function: ast.FunctionDef) -> bool:
    given = function.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    untyped = [one.arg for one in parameters if one is not None and one.annotation is None]
    return function.returns is None or bool(set(untyped) - {"self", "cls"})


def test_functions_that_are_not_compiled_have_types() -> None:
    found = [
        f"{path.relative_to(KERNELS)}:{one.lineno}: {one.name}"
        for path in sorted(KERNELS.rglob("*.py"))
        for one in functions(ast.parse(path.read_text()))
        if lacks_types(one)
    ]
    assert not found, "\n".join(found)
