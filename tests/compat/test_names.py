"""The importable `deep_ep`: every name is tokenyard's own, and nothing is defined twice."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokenyard
from tokenyard.compat import deep_ep_path

FOLDER = deep_ep_path.folder()
FILES = sorted(FOLDER.rglob("*.py"))

V1 = ("Buffer", "Config", "EventHandle", "EventOverlap")
V2 = ("ElasticBuffer", "EPHandle")
NAMES = {
    "deep_ep": (*V1, *V2, "HybridEPBuffer", "topk_idx_t"),
    "deep_ep.utils": ("EventHandle", "EventOverlap"),
    "deep_ep.utils.event": ("EventHandle", "EventOverlap"),
    "deep_ep.buffer": V1,
    "deep_ep.legacy": V1,
    "deep_ep.buffers.legacy": V1,
    "deep_ep.buffers.elastic": (*V2, "EventHandle", "EventOverlap"),
    "deep_ep.hybrid_ep_buffer": ("HybridEPBuffer",),
    "deep_ep._C": ("Config", "EventHandle", "topk_idx_t"),
    "deep_ep_cpp": ("Config", "EventHandle", "topk_idx_t"),
}
OTHERS = ("deep_ep.utils.envs", "deep_ep.utils.testing")


@pytest.fixture
def alias(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`deep_ep` can be imported in the test, and is forgotten after it."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in set(sys.modules) - known:
        if name.startswith("deep_ep"):
            del sys.modules[name]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_tokenyards(alias: None, name: str) -> None:
    module = importlib.import_module(name)
    for one in NAMES[name]:
        assert getattr(module, one) is getattr(tokenyard, one)


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_modules_are_found_before_they_are_imported(alias: None, name: str) -> None:
    found = importlib.util.find_spec(name)
    assert found is not None
    assert str(found.origin).startswith(str(FOLDER))


def test_the_version_says_whose_it_is(alias: None) -> None:
    version = importlib.import_module("deep_ep").__version__
    assert version == f"2.1.0+tokenyard.{tokenyard.__version__}"


def test_names_that_tokenyard_keeps_deeper(alias: None) -> None:
    from tokenyard.compat import deepep_tests as deepep
    from tokenyard.compat.hybrid_ep import indices_to_map

    deep_ep = importlib.import_module("deep_ep")
    for name in ("get_logical_domain_size", "get_physical_domain_size"):
        assert getattr(deep_ep, name) is getattr(deepep, name)
    assert importlib.import_module("deep_ep.hybrid_ep_buffer").indices_to_map is indices_to_map


def test_unknown_names_are_refused(alias: None) -> None:
    deep_ep = importlib.import_module("deep_ep")
    with pytest.raises(AttributeError, match=r"'deep_ep' \(tokenyard's\) has no attribute 'Bufer'"):
        _ = deep_ep.Bufer


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_modules_only_name_things(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.ClassDef)
        assert not isinstance(node, ast.FunctionDef) or node.name.startswith("_"), node.name


def checkout(folder: Path) -> Path:
    """One that has a helper which we lack, and one which we have."""
    utils = folder / "deep_ep" / "utils"
    utils.mkdir(parents=True)
    (utils / "math.py").write_text("from .envs import get_global_seed\nwhose = 'DeepEP'\n")
    (utils / "envs.py").write_text("whose = 'DeepEP'\n")
    return folder


def test_helpers_come_from_a_checkout(
    alias: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_EP_SOURCE", str(checkout(tmp_path)))
    helper = importlib.import_module("deep_ep.utils.math")
    assert helper.whose == "DeepEP"
    ours = importlib.import_module("deep_ep.utils.envs")
    assert not hasattr(ours, "whose")
    assert helper.get_global_seed is ours.get_global_seed


def test_without_a_checkout_there_are_no_helpers(
    alias: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEEP_EP_SOURCE", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"deep_ep\.utils\.math"):
        importlib.import_module("deep_ep.utils.math")


def test_a_folder_that_is_no_checkout_is_refused(
    alias: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_EP_SOURCE", str(tmp_path))
    with pytest.raises(ImportError, match=r"DEEP_EP_SOURCE is .*, want a checkout of DeepEP"):
        importlib.import_module("deep_ep.utils")
