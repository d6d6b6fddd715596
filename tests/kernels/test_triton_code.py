"""What Triton's compiler makes of the kernels for devices that are not there, read in its code."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Collection
from functools import cache

import pytest

from tests.cases.lanes import at_night
from tokenyard.kernels.base import has_triton, interprets_triton

if not has_triton() or interprets_triton():
    pytest.skip("needs triton, not interpreted", allow_module_level=True)

from tokenyard.kernels import triton as kernels
from tools.triton_aot import compile as ahead
from tools.triton_aot.compile import TARGETS, Compiled

NVIDIA = [name for name in TARGETS if name.startswith("sm_")]
AMD = [name for name in TARGETS if name.startswith("gfx")]

SUMMING = ("reduce", "unpermute", "gradients")
COUNTING = ("_outside_kernel", "_zero_kernel", "_find_kernel")  # of those that move rows


def by(targets: Collection[str]) -> pytest.MarkDecorator:
    """One target of each maker in the gate."""
    gate = {"sm_90", "gfx942"}.intersection(targets)
    return pytest.mark.parametrize("target", at_night(targets, gate))


by_target = by(TARGETS)


@cache
def made(target: str) -> list[Compiled]:
    return ahead.compile_for(target)


def of(target: str, *words: str) -> list[Compiled]:
    found = [one for one in made(target) if one.case.startswith(words)]
    assert found
    return found


@pytest.mark.timeout(600)
@by_target
def test_every_kernel_compiles(target: str) -> None:
    names = set()
    for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(info.name)
        names |= {name for name in vars(module) if re.fullmatch(r"_\w+_kernel", name)}
    assert len(names) > 15
    assert {one.kernel for one in made(target)} == names


@pytest.mark.timeout(600)
@by_target
def test_nothing_is_spilled(target: str) -> None:
    assert [one.case for one in made(target) if one.spills] == []


@by_target
def test_rows_move_16_bytes_at_once(target: str) -> None:
    """Where they may: those of every dtype at a hidden size of 7168."""
    dtypes = r"float|bfloat|int8|uint8"
    moving = [
        one
        for one in of(
            target,
            "pack",
            "unpack",
            "spread",
            "copy",
            "rearrange",
            "reduce",
            "unpermute",
        )
        if re.search(dtypes, one.case) and one.kernel not in COUNTING
    ]
    assert len(moving) > 50
    for one in moving:
        assert (one.widest("load"), one.widest("store")) == (16, 16), (one.case, one.kernel)
    for one in of(target, "spread"):
        assert one.widest("store") == 16, (one.case, one.kernel)


@by(NVIDIA)
def test_sums_are_ieee_on_nvidia(target: str) -> None:
    """No fused multiply-add, no flushed denormals, no approximate division."""
    for one in made(target):
        assert not re.search(r"\.ftz|\bdiv\.(full|approx)|\brcp\.approx", one.text), one.case
    for one in of(target, *SUMMING, "to_fp8", "from_fp8"):
        assert not re.search(r"\bfma\.", one.text), one.case
    for one in of(target, "unpermute float32 weighted"):
        if one.kernel == "_unpermute_kernel":
            assert re.search(r"\bmul(\.rn)?\.f32", one.text)
            assert re.search(r"\badd(\.rn)?\.f32", one.text)
    for one in of(target, "to_fp8 float32 plain"):
        assert "div.rn.f32" in one.text


@by(AMD)
def test_sums_are_ieee_on_amd(target: str) -> None:
    """No fused multiply-add; denormals are kept, as 3 in these modes says."""
    fused = re.compile(r"\bv_(pk_)?(fma|fmac|mad|mac)(mk|ak)?_(f|mix)")
    for one in of(target, *SUMMING, "from_fp8"):
        assert not fused.search(one.text), one.case
    for one in made(target):
        modes = re.findall(r"\.amdhsa_float_denorm_mode_(?:32|16_64) (\d)", one.text)
        assert modes == ["3", "3"], one.case


@by_target
def test_atomics_that_only_count_are_relaxed_and_nothing_else_is_atomic(target: str) -> None:
    """Counters are read by later kernels: no order is wanted, and none is paid for."""
    counting = of(target, "layout", "align", "place", "unpermute", "gradients")
    moving = [one for one in made(target) if one not in counting]
    word = r"\batom\.|\bred\." if target in NVIDIA else r"_atomic_"
    assert not [one.case for one in moving if re.search(word, one.text)]
    for one in counting:
        assert not re.search(r"\.(acq_rel|acquire|release)\b", one.text), one.case


@by(NVIDIA)
def test_flags_are_released_and_acquired_at_system_scope_on_nvidia(target: str) -> None:
    """A store is relaxed by itself, and made a release by the fence of all threads before it."""
    (raised,), (awaited,) = of(target, "raise"), of(target, "await")
    fence = r"fence\.(?:release|acq_rel)\.sys;\s+(?://[^\n]*\s+)*"
    stores = re.findall(r"\bst\.\w+\.\w+\.global\S*", raised.text)
    assert stores
    assert set(stores) == {"st.relaxed.sys.global.b64"}
    released = re.findall(rf"bar\.sync\s+0;\s+{fence}@%p\d+ st\.relaxed\.sys", raised.text)
    assert len(released) == len(stores)
    loads = re.findall(r"\bld\.\w+\.\w+\.global\S*", awaited.text)
    assert set(loads) == {"ld.relaxed.sys.global.b64"}
    acquired = re.findall(
        r"ld\.relaxed\.sys[^;]*;[^;]*?fence\.(?:acquire|acq_rel)\.sys;", awaited.text
    )
    assert len(acquired) == len(loads)


@by(AMD)
def test_flags_are_released_and_acquired_at_system_scope_on_amd(target: str) -> None:
    """Write-back of all caches before the store, invalidation after the load; sc0 sc1 is system."""
    (raised,), (awaited,) = of(target, "raise"), of(target, "await")
    stores = re.findall(r"global_store_dwordx2.*", raised.text)
    released = re.findall(
        r"buffer_wbl2 sc0 sc1\s+s_waitcnt vmcnt\(0\)(?:(?!global_).)*?"
        r"global_store_dwordx2[^\n]* sc0 sc1",
        raised.text,
        re.DOTALL,  # nothing reaches memory between the write-back and the store
    )
    assert len(released) == len(stores) > 0
    loads = re.findall(r"global_load_dwordx2.* sc0 sc1", awaited.text)
    acquired = re.findall(
        r"global_load_dwordx2.* sc0 sc1\s+s_waitcnt vmcnt\(0\)[^\n]*\s+buffer_inv sc0 sc1",
        awaited.text,
    )
    assert len(acquired) == len(loads) > 0


@by_target
def test_rows_are_published_by_nothing_but_flags(target: str) -> None:
    word = r"\.relaxed\.|\.release|\batom\b" if target in NVIDIA else r"sc0 sc1|_atomic_"
    for one in of(target, "put", "reduce"):
        assert not re.search(word, one.text), one.case
