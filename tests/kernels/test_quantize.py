"""FP8 casts of each kernel set against `spec`, bit for bit, through the public functions."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tokenyard
from tests.cases.kernel_sets import FOR_CPUS, SETS
from tests.cases.lanes import at_night
from tokenyard import per_token_cast_back, per_token_cast_to_fp8, spec
from tokenyard.testing import assert_same, poisoned

FP8 = torch.float8_e4m3fn
FROM = (torch.bfloat16, torch.float16, torch.float32)
SCALES = {
    "plain": {},
    "rounded": {"round_scale": True},
    "packed": {"round_scale": True, "use_ue8m0": True},
}

ORDERS = ["ascending", "interleaved", "shuffled", "finite", "one inf"]
by_set = pytest.mark.parametrize("kernel_set", SETS)
by_dtype = pytest.mark.parametrize("dtype", FROM, ids=str)
by_scales = pytest.mark.parametrize("scales", SCALES)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned():
        yield


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def every_half(dtype: torch.dtype) -> Tensor:
    return torch.arange(65536).to(torch.uint16).view(dtype)


def special_row() -> Tensor:
    """A NaN and both infinities among ordinary numbers, one to each of four groups; [1, 640]."""
    x = torch.randn(1, 640, generator=rng())
    x[0, 3], x[0, 128 + 77], x[0, 256 + 127], x[0, 384] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        torch.inf,
    )
    x[0, 385] = -torch.nan
    return x


@by_set
@by_scales
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("order", at_night(ORDERS, gate=("shuffled", "one inf")))
def test_every_half(kernel_set: str, scales: str, dtype: torch.dtype, order: str) -> None:
    """All 65,536 values, with neighbours and with strangers, so that each meets several scales."""
    x = every_half(dtype)
    if order == "interleaved":
        x = x.view(512, 128).t().flatten()
    if order in ("shuffled", "finite", "one inf"):
        x = x[torch.randperm(len(x), generator=rng())]
    if order in ("finite", "one inf"):
        x = x.nan_to_num(1.0, 2.0, -2.0)
    x = x.reshape(64, 1024)
    if order == "one inf":
        x[:, ::256] = torch.inf
    got = per_token_cast_to_fp8(x, **SCALES[scales], kernels=kernel_set)
    assert_same(got, spec.cast_to_fp8(x, **SCALES[scales]))


@by_set
@settings(max_examples=60, deadline=None)
@given(
    noise=st.binary(min_size=1024, max_size=1024),
    top=st.integers(8, 255),
    scales=st.sampled_from([*SCALES]),
)
def test_any_float32(kernel_set: str, noise: bytes, top: int, scales: str) -> None:
    """Bit patterns at random, and exponents that reach from `top` below the subnormals of e4m3."""
    bits = torch.frombuffer(bytearray(noise * 2), dtype=torch.int32).view(2, 256)
    below = (bits[1] >> 23 & 0xFF) % 24
    bits[1] = bits[1] & ~0x7F800000 | (top - below).clamp(0) << 23
    x = bits.view(torch.float32).view(1, 512)
    got = per_token_cast_to_fp8(x, **SCALES[scales], kernels=kernel_set)
    assert_same(got, spec.cast_to_fp8(x, **SCALES[scales]))


@by_set
@by_dtype
@pytest.mark.parametrize("magnitude", [0.0, 1e-42, 1e-6, 1e-4, 1.0, 1e4, 3e37])
def test_magnitudes(kernel_set: str, dtype: torch.dtype, magnitude: float) -> None:
    """Down to zeros of both signs, whose scale is that of 1e-4, and up to infinity in float16."""
    x = (torch.randn(5, 640, generator=rng(), dtype=torch.float64) * magnitude).to(dtype)
    got = per_token_cast_to_fp8(x, kernels=kernel_set)
    assert_same(got, spec.cast_to_fp8(x))


@by_set
@by_scales
def test_edges_of_powers_of_two(kernel_set: str, scales: str) -> None:
    """Largest numbers of a group around 448 * 2**k, where a rounded scale doubles."""
    at = 448 * 2.0 ** torch.arange(-30, 119)
    edges = torch.cat([at.nextafter(torch.tensor(0.0)), at, at.nextafter(torch.tensor(torch.inf))])
    x = torch.randn(len(edges), 512, generator=rng()).clamp(-1, 1) * edges[:, None]
    x[:, ::128] = -edges[:, None]
    got = per_token_cast_to_fp8(x, **SCALES[scales], kernels=kernel_set)
    assert_same(got, spec.cast_to_fp8(x, **SCALES[scales]))


@pytest.mark.parametrize("kernel_set", FOR_CPUS)
@by_dtype
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="NaN is the machine's")
def test_codes_of_nan_are_those_of_torch(kernel_set: str, dtype: torch.dtype) -> None:
    x = special_row().to(dtype)
    bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32)
    bits[0, 385] |= torch.iinfo(bits.dtype).min  # a NaN with a sign, whatever the conversion did
    groups = x.view(5, 128)
    want = groups * (448.0 / groups.abs().float().amax(1, keepdim=True).clamp(1e-4))
    got, _ = per_token_cast_to_fp8(x, kernels=kernel_set)
    assert_same(got.view(torch.uint8), want.to(FP8).view(1, 640).view(torch.uint8))
    assert set(got.view(torch.uint8)[got.isnan()].tolist()) == {0x7F, 0xFF}


@by_set
def test_packed_scales_are_the_exponents_of_rounded_ones(kernel_set: str) -> None:
    x = torch.randn(6, 1024, generator=rng()) * torch.logspace(-6, 6, 6)[:, None]
    rounded = per_token_cast_to_fp8(x, round_scale=True, kernels=kernel_set)
    packed = per_token_cast_to_fp8(x, round_scale=True, use_ue8m0=True, kernels=kernel_set)
    assert_same(packed[0], rounded[0])
    assert (packed[1].dtype, packed[1].shape) == (torch.int32, (6, 2))
    assert_same(spec.unpack_ue8m0(packed[1]), rounded[1])
    assert_same(spec.pack_ue8m0(rounded[1]), packed[1])
    back = per_token_cast_back(*packed, kernels=kernel_set)
    assert_same(back, per_token_cast_back(*rounded, kernels=kernel_set))


def every_code(num_rows: int) -> Tensor:
    return torch.arange(256).to(torch.uint8).repeat(num_rows, 2).view(FP8)


@by_set
def test_every_code_back(kernel_set: str) -> None:
    ordinary = torch.rand(64, 4, generator=rng()) * 3
    powers = (2.0 ** torch.arange(-149, 128, dtype=torch.float64)).float()
    limits = torch.tensor([0.0, -0.0, -1.5, 1e-45, 3.4e38, torch.inf, -torch.inf, torch.nan])
    scales = torch.cat([ordinary, powers[:276].view(-1, 4), limits.view(-1, 4), -ordinary])
    x = every_code(len(scales))
    got = per_token_cast_back(x, scales, kernels=kernel_set)
    assert_same(got, spec.cast_back(x, scales))


@by_set
@settings(max_examples=40, deadline=None)
@given(noise=st.binary(min_size=64, max_size=64))
def test_every_code_back_with_any_scale(kernel_set: str, noise: bytes) -> None:
    scales = torch.frombuffer(bytearray(noise), dtype=torch.float32).view(4, 4)
    x = every_code(4)
    assert_same(per_token_cast_back(x, scales, kernels=kernel_set), spec.cast_back(x, scales))


@by_set
def test_every_packed_exponent_back(kernel_set: str) -> None:
    packed = torch.arange(256).to(torch.uint8).view(torch.int32).view(64, 1)
    x = every_code(64)
    assert_same(per_token_cast_back(x, packed, kernels=kernel_set), spec.cast_back(x, packed))


@by_set
@pytest.mark.parametrize("shape", [(0, 512), (3, 0), (1, 512), (1, 1024)], ids=str)
@by_scales
def test_small_shapes(kernel_set: str, shape: tuple[int, int], scales: str) -> None:
    x = torch.randn(shape, generator=rng()).bfloat16()
    got = per_token_cast_to_fp8(x, **SCALES[scales], kernels=kernel_set)
    assert_same(got, spec.cast_to_fp8(x, **SCALES[scales]))
    assert_same(per_token_cast_back(*got, kernels=kernel_set), spec.cast_back(*got))


STRIDED = {
    "rows apart": lambda x: x[::2],
    "columns apart": lambda x: x[:, ::3],
    "part of a row": lambda x: x[:, 5:389],
    "transposed": lambda x: x[:256, :40].t(),
    "one row for all": lambda x: x[:1, :256].expand(4, 256),
    "a row of odd stride": lambda x: x.flatten().as_strided((1, 128), (5, 1)),
    "off the line": lambda x: x.flatten()[1:1025].view(2, 512),
}


@by_set
@by_dtype
@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED)
def test_strided_rows(kernel_set: str, dtype: torch.dtype, view: Any) -> None:
    x = view(torch.randn(300, 1152, generator=rng()).to(dtype))
    values, scales = per_token_cast_to_fp8(x, kernels=kernel_set)
    assert_same((values, scales), spec.cast_to_fp8(x))
    assert values.stride() == (x.shape[1], 1)
    spread = torch.stack([scales, scales], 2)[:, :, 0]  # scales in another stride
    both = torch.stack([values, values], 2)[:, :, 1]
    assert_same(
        per_token_cast_back(both, spread, kernels=kernel_set), spec.cast_back(values, scales)
    )


@by_dtype
@by_scales
@pytest.mark.parametrize("num_threads", [1, 5])
def test_much(dtype: torch.dtype, scales: str, num_threads: int) -> None:
    """Enough for streaming stores and threads, against the reference set: `spec` is too slow."""
    x = torch.randn(301, 10240, generator=rng()).to(dtype)
    x[::50, :640] = special_row().to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        got = per_token_cast_to_fp8(x, **SCALES[scales], kernels="numba")
        back = per_token_cast_back(*got, kernels="numba")
    finally:
        torch.set_num_threads(before)
    assert_same(got, per_token_cast_to_fp8(x, **SCALES[scales], kernels="reference"))
    assert_same(back, per_token_cast_back(*got, kernels="reference"))
    assert got[0].data_ptr() % 64 == back.data_ptr() % 64 == 0


@by_set
def test_parameters_are_taken_and_no_gradient_flows(kernel_set: str) -> None:
    x = torch.nn.Parameter(torch.randn(2, 256, generator=rng()))
    values, scales = per_token_cast_to_fp8(x, kernels=kernel_set)
    assert_same((values, scales), spec.cast_to_fp8(x.detach()))
    back = per_token_cast_back(values, scales.requires_grad_(), kernels=kernel_set)
    assert not values.requires_grad
    assert not back.requires_grad


@by_set
def test_one_shape_with_other_dtypes_and_options(kernel_set: str) -> None:
    """What is kept of a shape must not serve another dtype or another rounding."""
    x = torch.randn(2, 512, generator=rng())
    for dtype in (*FROM, *reversed(FROM)):
        for options in SCALES.values():
            got = per_token_cast_to_fp8(x.to(dtype), **options, kernels=kernel_set)
            assert_same(got, spec.cast_to_fp8(x.to(dtype), **options))


def test_called_as_in_deepep() -> None:
    import tokenyard as deep_ep

    x = torch.randn(3, 256, generator=rng()).bfloat16()
    x_fp8, x_scales = deep_ep.per_token_cast_to_fp8(x)
    assert_same(deep_ep.per_token_cast_back(x_fp8, x_scales), spec.cast_back(x_fp8, x_scales))
    back = deep_ep.per_token_cast_back(x_fp8=x_fp8, x_scales=x_scales)
    assert_same(back, spec.cast_back(x_fp8, x_scales))


def test_other_devices_take_the_reference_set() -> None:
    x = torch.empty(3, 512, device="meta", dtype=torch.bfloat16)
    values, scales = per_token_cast_to_fp8(x, round_scale=True, use_ue8m0=True)
    assert (values.shape, values.dtype, values.device.type) == ((3, 512), FP8, "meta")
    assert (scales.shape, scales.dtype) == ((3, 1), torch.int32)
    assert per_token_cast_back(values, scales).shape == (3, 512)


class Other(Tensor):
    """A subclass that kernels know nothing of."""


CODES, ONE = torch.zeros(2, 256).to(FP8), torch.ones(2, 2)
TO: Any = per_token_cast_to_fp8
BACK: Any = per_token_cast_back
REFUSED: dict[str, Callable[[], object]] = {
    "x is a list, want a torch.Tensor": partial(TO, [[1.0] * 128]),
    "x is None, want a torch.Tensor": partial(TO, None),
    "x has type Other, want torch.Tensor": partial(TO, torch.zeros(1, 128).as_subclass(Other)),
    "x has shape [128], want [tokens, hidden]": partial(TO, torch.zeros(128)),
    "x has dtype float64, want bfloat16, float16, float32": partial(
        TO, torch.zeros(1, 128).double()
    ),
    "x has dtype float8_e4m3fn, want bfloat16, float16, float32": partial(TO, CODES),
    "x has layout torch.sparse_coo, want torch.strided": partial(TO, torch.eye(128).to_sparse()),
    "x has hidden size 100, want a multiple of 128": partial(TO, torch.zeros(1, 100)),
    "use_ue8m0 is True with round_scale=False, want round_scale=True": partial(
        TO, torch.zeros(1, 512), use_ue8m0=True
    ),
    "x has hidden size 640, want a multiple of 512, since UE8M0 scales come in fours": partial(
        TO, torch.zeros(1, 640), round_scale=True, use_ue8m0=True
    ),
    "unknown kernel set 'nmba'; available: auto, numba, reference": partial(
        TO, torch.zeros(1, 128), kernels="nmba"
    ),
    "kernels is 'numba' for tensors on meta, want auto or reference": partial(
        TO, torch.zeros(1, 128, device="meta"), kernels="numba"
    ),
    "x_fp8 is a tuple, want a torch.Tensor": partial(BACK, (CODES, ONE), None),
    "x_scales is None, want a torch.Tensor": partial(BACK, CODES, None),
    "x_fp8 has dtype float8_e5m2, want float8_e4m3fn": partial(
        BACK, CODES.float().to(torch.float8_e5m2), ONE
    ),
    "x_fp8 has hidden size 100, want a multiple of 128": partial(BACK, CODES[:, :100], ONE),
    "x_fp8 has hidden size 256, want a multiple of 512, since UE8M0 scales come in fours": partial(
        BACK, CODES, ONE.int()
    ),
    "x_scales has shape [2, 3], want [2, 2]": partial(BACK, CODES, torch.ones(2, 3)),
    "x_scales has shape [1, 2], want [2, 2]": partial(BACK, CODES, torch.ones(1, 2)),
    "x_scales has dtype bfloat16, want float32, int32": partial(BACK, CODES, ONE.bfloat16()),
    "x_scales is on device meta, want x_fp8's, cpu": partial(BACK, CODES, ONE.to("meta")),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses(message: str) -> None:
    for _ in range(2):  # a refusal is not remembered as a plan
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            REFUSED[message]()


def test_public_names() -> None:
    assert {"per_token_cast_to_fp8", "per_token_cast_back"} <= set(tokenyard.__all__)
