"""What Numba makes of kernels for ARM64, compiled on this machine and read as text.

ARM may swap any two accesses to memory that nothing orders, so that what x86 orders by itself must
be an instruction here. Emulation on x86 cannot show that one is missing: reading can.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.aarch64 import HALF, Code, read
from tests.cases.clock import scaled
from tests.cases.kernel_code import OWN_ROWS, SIGNALS, SIGNATURES, STREAM, WAIT, Flow
from tests.cases.package import cold

SUM = "reduce._reduce_kernel"
SLOTS = "call.slots._dispatch_kernel", "call.slot_sums._combine_kernel"
CHOSEN = (
    *(*SIGNALS, *WAIT, *OWN_ROWS),
    *("rows._pack_kernel", "rows._scatter_kernel", SUM, SUM + HALF),
    *("ring.dispatch._dispatch_kernel", *SLOTS),
)

# Accesses that order others, and how processors of several generations do them.
ORDERED = {"store atomic ": ("stlr", "stlur"), "load atomic ": ("ldar", "ldapr", "ldapur")}
# Fences, and what ARM64 does for each. The first is `fence_stores`; Numba has the others where it
# gives up a reference to an array.
FENCES = {"seq_cst": "ish", "release": "ish", "acquire": "ishld"}
# One rounding for a product and a sum: no result would equal `spec`.
FUSED = re.compile(r"fn?m(add|sub|ad|sb)|fn?ml[as]\w*|fcmla|fmmla|bf(dot|mlal\w*|mmla)")
# What a kernel may call: itself, Python, Numba and libc; nothing that converts halves.
CALLED = re.compile(r"_ZN\w+|_?Py\w+|NRT_\w+|numba_\w+|mem(cpy|set|move)|sched_yield|clock_gettime")


def instructions(code: Code) -> list[str]:
    return re.findall(r"^\t([a-z][\w.]*)", code.assembly, re.M)


def bodies(code: Code) -> Iterator[tuple[str, str]]:
    """Each function, in LLVM and in instructions."""
    for symbol, llvm in re.findall(r"^define .*?@([^(]+)\((.*?)^}", code.llvm, re.M | re.S):
        yield llvm, code.assembly.split(f"\n{symbol}:\n")[1].split(".Lfunc_end")[0]


def check(name: str, code: Code) -> None:
    """What must hold for every kernel."""
    found = instructions(code)
    assert "ret" in found, name
    assert [one for one in found if FUSED.fullmatch(one)] == [], name
    called = re.findall(r"^\tbl\t(\S+)", code.assembly, re.M)
    assert [one for one in called if not CALLED.fullmatch(one)] == [], name
    for ordered, by in ORDERED.items():
        assert (ordered in code.llvm) == any(one in by for one in found), f"{name}: {ordered}"
    for llvm, assembly in bodies(code):
        want = {FENCES[order] for order in re.findall(r"^  fence (\w+)", llvm, re.M)}
        assert set(re.findall(r"^\tdmb\t(\w+)", assembly, re.M)) == want, name
    assert ("!nontemporal" in code.llvm) <= ("stnp" in found), name


def check_order(name: str, code: Code) -> None:
    """As `test_fences` does on this machine, and where the instructions stand."""
    flow = Flow(code.llvm)
    if name in SIGNALS:
        assert not flow.leaves_dirty(code.symbol, True), name
        assert (flow.signals > 0, flow.dirty_signals) == (True, 0), name
        body = code.assembly.split(f"\n{code.symbol}:\n")[1].split(".Lfunc_end")[0]
        assert 0 <= body.find("dmb\tish") < body.find("stlr"), name
    else:
        assert not flow.leaves_dirty(code.symbol, False), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_chosen_kernels(tmp_path: Path) -> None:
    """One test, since it is the compilation that takes time."""
    codes = read(tmp_path, *CHOSEN, timeout=scaled(250))
    assert set(codes) == set(CHOSEN)
    for name, code in codes.items():
        check(name, code)
        check_order(name, code)
    found = {name: set(instructions(code)) for name, code in codes.items()}
    for name in (*SIGNALS, *OWN_ROWS):
        assert "stlr" in found[name], name
    for name in ("signals.reaches", "ring.dispatch._dispatch_kernel", *SLOTS):
        assert {"ldar", "isb"} <= found[name], name
        assert "yield" not in found[name], name
    for name in (one for one in CHOSEN if one.removesuffix(HALF) in STREAM):
        assert {"stnp", "dmb"} <= found[name], name
    assert {"fcvtl", "fcvtn"} <= found[SUM + HALF]
    assert not {"fcvtl", "fcvtn"} & found[SUM], "bfloat16 is converted by shifts"
    assert {"fmul", "fadd"} <= found[SLOTS[1]], "products are rounded before they are added"


def test_fused_instructions_and_helpers_are_known() -> None:
    assert all(map(FUSED.fullmatch, ("fmadd", "fnmsub", "fmla", "fmlal2", "fmad", "bfmlalb")))
    assert not any(map(FUSED.fullmatch, ("fmul", "fadd", "fmov", "fmaxnm", "bfi", "bfxil")))
    assert not any(map(CALLED.fullmatch, ("__gnu_h2f_ieee", "__extendhfsf2", "__truncsfbf2")))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("cpu", ["generic", "cortex-a72", "neoverse-n1", "neoverse-v2", "apple-m1"])
def test_processors(tmp_path: Path, cpu: str) -> None:
    """Every kernel that streams, signals or waits: on processors with and without half arithmetic,
    bfloat16 and wide vectors.
    """
    codes = read(tmp_path, *SIGNATURES, SUM + HALF, cpu=cpu, timeout=scaled(1400))
    assert len(codes) == len(SIGNATURES) + 1
    for name, code in codes.items():
        check(name, code)
        check_order(name, code)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_all_signatures(tmp_path: Path) -> None:
    """Whatever `warm_up` compiles for this machine, for rows of all dtypes."""
    settings, arm = cold(tmp_path), tmp_path / "arm"
    warm = Path(settings["NUMBA_CACHE_DIR"])
    arm.mkdir()
    dtypes = ("bfloat16", "float16", "float32", "float64")
    subprocess.run(
        [sys.executable, "-m", "tokenyard", "warm-up", "--dtypes", ",".join(dtypes)],
        env={**os.environ, **settings},
        timeout=scaled(1400),
        check=True,
    )
    codes = read(arm, compiled=warm, timeout=scaled(1400))
    assert len(codes) == len(list(warm.rglob("*.nbc")))
    kernels = {name.rsplit("-", 1)[0] for name in codes}
    print(f"{len(codes)} signatures of {len(kernels)} kernels")
    assert len(kernels) > len(SIGNATURES)
    for name, code in codes.items():
        check(name, code)
