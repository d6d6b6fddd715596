"""The triton set where it differs from the others: tiles, programs, and how numbers are rounded.

Run with TRITON_INTERPRET=1, as all tests that are marked `triton`.
"""

from __future__ import annotations

import importlib
import threading

import numpy as np
import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tokenyard import kernels, spec
from tokenyard.kernels.base import interprets_triton
from tokenyard.testing import assert_same, poisoned, routing, run_virtual

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not interprets_triton(), reason="needs triton and TRITON_INTERPRET=1"),
]


SLOW = pytest.mark.slow


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "item",
    ["u2", "c16", "V3", *(pytest.param(one, marks=SLOW) for one in ("u1", "u4", "u8", "V12"))],
)
@pytest.mark.parametrize(
    "shape, axes",
    [((70, 133), (1, 0)), ((3, 20, 66), (2, 0, 1)), ((2, 2, 67, 2), (1, 3, 2, 0))],
    ids=str,
)
def test_tiles_meet(shape: tuple[int, ...], axes: tuple[int, ...], item: str) -> None:
    """Several tiles each way, the last of them in part; in rows of a wider array."""
    size = int(np.prod(shape)) * np.dtype(item).itemsize
    src = np.resize(np.arange(251, dtype=np.uint8), size).view(item).reshape(shape)
    src = src.transpose(axes)
    memory = np.zeros((*src.shape[:-1], src.shape[-1] + 3), item)
    for dst in (np.zeros(src.shape, item), memory[..., 2:-1]):
        tokenyard.rearrange(dst, src, kernels="triton")
        assert dst.tobytes() == src.tobytes()
    assert not memory[..., :2].tobytes().strip(b"\0")
    assert not memory[..., -1:].tobytes().strip(b"\0")


@pytest.mark.parametrize("width", [1, 6, 16, 100, 4096 + 48, 4096 + 3])
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_rows_of_every_granule(width: int, shift: int) -> None:
    """Wider than a tile, and begun on and beside the boundaries of 16, 8, 4 and 2 bytes."""
    triton = kernels.load("triton")
    x = torch.randint(0, 256, (9, width + 32), generator=rng()).byte()[:, shift : shift + width]
    index = torch.tensor([8, 0, 0, 5, 3], dtype=torch.int32)
    records = torch.zeros(5, width + 16, dtype=torch.uint8)
    triton.pack(x, index, records[:, shift : shift + width])
    assert_same(records[:, shift : shift + width].clone(), x[index.long()])
    records[:, shift : shift + width] = 0
    assert records.sum() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_sums_of_several_blocks(dtype: torch.dtype) -> None:
    """Rows that several programs share, and that begin beside 16 bytes."""
    y = torch.randn(7, 5001, generator=rng()).to(dtype)[:, 1:]
    row_of = torch.tensor([[0, 6, -1], [3, 3, 2], [-1, -1, -1]])
    weights = torch.randn(3, 3, generator=rng(1))
    got = tokenyard.unpermute(y, row_of, weights=weights, kernels="triton")
    assert_same(got, spec.unpermute(y, row_of, weights=weights))


def test_bfloat16_is_rounded_as_torch_does() -> None:
    """Every pattern of the upper half, with lower halves below, at and above each tie."""
    upper = torch.arange(65536, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper | lower).flatten()
    y = torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)[None]
    triton = kernels.load("triton")
    route = triton.route(torch.ones(1, 2, dtype=torch.bool))
    out = torch.empty(y.shape, dtype=torch.bfloat16)
    # Rows of bfloat16 whose sum in float32 is every such number that two of them can add up to.
    halves = y.bfloat16(), (y - y.bfloat16().float()).bfloat16()
    triton.reduce(torch.cat(halves), route, (0, 0), [], out)
    assert_same(out, (0.0 + halves[0].float() + halves[1].float()).bfloat16())


def test_segments_of_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many experts a program has many pairs, and counts on where it left off."""
    align = importlib.import_module("tokenyard.kernels.triton.align")  # not the function
    monkeypatch.setattr(align, "_MOST_COUNTS", 2 * 20)
    topk_ids, _ = routing("holes", 150, 4, 20)
    with poisoned():
        got = tokenyard.moe_align_block_size(topk_ids, 16, 20, kernels="triton")
        places = tokenyard.permute(torch.zeros(150, 1), topk_ids, 20, kernels="triton")
    want = spec.moe_align_block_size(topk_ids, 16, 20)
    assert_same(
        tuple(got), (want.sorted_token_ids, want.expert_ids, want.num_tokens_post_pad), "aligned"
    )
    assert_same(places.row_of, spec.permute(torch.zeros(150, 1), topk_ids, 20).row_of)


@pytest.mark.parametrize("num_ranks, nodes", [(1, None), (5, (0, 0, 1, 1, 2)), (70, None)], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 150])
def test_count_is_layout_and_route(
    num_ranks: int, nodes: tuple[int, ...] | None, num_tokens: int
) -> None:
    """Lists have room for rows that do not come, which settling cuts off."""
    triton, num_experts = kernels.load("triton"), 2 * num_ranks
    topk_idx, _ = routing("holes", num_tokens, 4 if num_ranks > 1 else 1, num_experts)
    owners = torch.arange(num_experts, dtype=torch.int32) // 2
    with poisoned():
        counted = triton.count(topk_idx, owners, num_ranks, nodes)
    world = spec.World(tuple(owners.tolist()), nodes or (0,) * num_ranks)
    want = spec.layout(topk_idx, world)
    assert_same(tuple(counted.layout), tuple(want))
    numbers = [-1, *want.num_tokens_per_rank.tolist(), *want.num_tokens_per_expert.tolist()]
    assert counted.numbers.tolist() == numbers
    settled = counted.settle(counted.numbers.numpy())
    assert_same(tuple(settled), tuple(kernels.load("reference").route(want.is_token_in_rank)))
    if num_tokens:
        topk_idx[num_tokens // 2, 0] = num_experts
        bad = triton.count(topk_idx, owners, num_ranks, nodes).numbers[0]
        assert int(bad) == num_tokens // 2 * topk_idx.shape[1]


def test_threads_take_turns() -> None:
    """The interpreter has one state for all of them."""
    topk_ids, _ = routing("uniform", 40, 4, 20)
    want = spec.moe_align_block_size(topk_ids, 16, 20)
    errors: list[BaseException] = []

    def job() -> None:
        try:
            got = tokenyard.moe_align_block_size(topk_ids, 16, 20, kernels="triton")
            assert_same(got.sorted_token_ids, want.sorted_token_ids)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=job) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(200))
    assert not errors


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="kernels is 'triton' for tensors on meta, want auto or"):
        kernels.pick("triton", "meta")


def test_the_low_latency_mode_has_no_kernels_here() -> None:
    def job(group: object) -> str:
        with pytest.raises(ValueError) as caught:
            tokenyard.Buffer(group, low_latency_mode=True, kernels="triton")
        return str(caught.value)

    (message,) = run_virtual(job, 1).results
    assert message.startswith(
        "Buffer: kernels is 'triton' with low_latency_mode, want auto, numba or ref"
    )
