"""The small parts of ElasticBuffer: what a rank does with a table, its neighbours and sessions."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tokenyard import spec
from tokenyard.testing import assert_same

FP8 = torch.float8_e4m3fn


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fetch(group: Any, transport: str, dtype: torch.dtype) -> None:
    """Two tables, the second larger, and fetches of which no other rank knows."""
    rank, size = group.rank(), group.size()
    with tokenyard.ElasticBuffer(group, transport=transport) as buffer:
        for num_entries, hidden in ((6, 8), (17, 40)):
            storages = [noise(num_entries, hidden, seed=r, dtype=dtype) for r in range(size)]
            sf = torch.rand(num_entries * size, 3) if dtype == FP8 else None
            buffer.engram_write(storages[rank], sf=sf)
            for number in range(rank + 1):
                draw = torch.Generator().manual_seed(100 * rank + number)
                shape = (number * 5, 3)
                indices = torch.randint(0, size * num_entries, shape, generator=draw)
                hook = buffer.engram_fetch(indices.int(), use_tma_aligned_col_major_sf=number == 1)
                data, scales = hook()
                assert_same(data, spec.engram_fetch(storages, indices))
                if sf is None:
                    assert scales is None
                else:
                    assert_same(scales.contiguous(), sf[indices.flatten()].view(len(indices), 9))
                    assert scales.stride(0) == (1 if number == 1 else 9)


def pipe(group: Any, transport: str, num_slots: int, seed: int) -> None:
    """Tensors of all sizes between neighbours, each received some time after it was sent."""
    rank, size = group.rank(), group.size()
    draw = random.Random(seed)
    sent = []
    for number in range(12 * size):
        source = draw.randrange(size)
        to = (source + draw.choice((1, -1))) % size
        shape = draw.choice([(), (3,), (4, 16), (0, 2)])
        sent.append((source, to, noise(*shape, seed=number, dtype=torch.float32)))
    with tokenyard.ElasticBuffer(group, transport=transport) as buffer:
        buffer.pp_set_config(4 * 16 * 4, num_slots)
        got: dict[int, list[Tensor]] = {}
        waiting: list[tuple[int, Tensor]] = []

        def take() -> None:
            source, like = waiting.pop(0)
            result = torch.full_like(like, torch.nan)
            buffer.pp_recv(result, source)
            got.setdefault(source, []).append(result)

        for source, to, t in sent:
            if rank == source:
                buffer.pp_send(t.clone(), to)
            elif rank == to:
                waiting.append((source, t))
                if len(waiting) >= min(num_slots, 2):
                    take()
        while waiting:
            take()
        for source, results in got.items():
            for one, want in zip(results, spec.pp_received(sent, source, rank), strict=True):
                assert_same(one, want)
        buffer.barrier()
        buffer.pp_set_config(1024, num_slots)
        if rank < 2:
            t = torch.full((256,), float(rank))
            buffer.pp_send(t, 1 - rank)
            buffer.pp_recv(t, 1 - rank)
            assert_same(t, torch.full((256,), 1.0 - rank))


def sessions(group: Any, transport: str) -> None:
    """Sessions with all-gathers that are awaited in any order, of tensors in place and not."""
    rank, size = group.rank(), group.size()
    shapes = [(3, 5), (7,), (2, 2, 4), ()]
    with tokenyard.ElasticBuffer(group, transport=transport) as buffer:
        room = buffer.get_agrs_num_max_session_bytes(group, shapes, torch.bfloat16)
        buffer.agrs_set_config(room, len(shapes))
        for number in range(6):
            given = [
                [noise(*shape, seed=10 * number + r + 1000 * k) for k, shape in enumerate(shapes)]
                for r in range(size)
            ]
            with buffer.agrs_new_session():
                mine: Any = given[rank]
                if number % 2:
                    mine = buffer.agrs_get_inplace_tensor(shapes, torch.bfloat16)
                    for place, t in zip(mine, given[rank], strict=True):
                        place.copy_(t)
                if number % 3 == 0:
                    *results, handle = buffer.all_gather(mine)
                    handles = [handle]
                else:
                    several = [buffer.all_gather(t) for t in mine]
                    results, handles = [one[0] for one in several], [one[1] for one in several]
                for handle in random.Random(rank).sample(handles, len(handles)):
                    handle()
                for k, result in enumerate(results):
                    assert_same(result, spec.agrs_gathered([one[k] for one in given]))
            with buffer.agrs_new_session(enabled=False):
                pass
        buffer.create_agrs_session()
        alone: Any = buffer.agrs_get_inplace_tensor((4,), torch.float32)
        alone.fill_(rank)
        last, handle = buffer.all_gather(alone)
        handle()
    # The results of a session stay readable when the buffer is closed.
    assert_same(last, torch.arange(float(size))[:, None].expand(size, 4).contiguous())


def die(group: Any, transport: str, call: str) -> str:
    """Rank 1 ends before the others need it in a call. Returns how they hear of it."""
    rank = group.rank()
    buffer = tokenyard.ElasticBuffer(group, transport=transport, timeout=scaled(20))
    buffer.pp_set_config(64, 1)
    buffer.agrs_set_config(1024, 4)
    if rank == 1:
        buffer.barrier()
        os._exit(7)
    buffer.barrier()
    try:
        if call == "pp_recv":
            buffer.pp_recv(torch.ones(4), 1)
        elif call == "pp_send":
            for _ in range(3):
                buffer.pp_send(torch.ones(4), 1)
        elif call == "engram_write":
            buffer.engram_write(torch.ones(2, 2))
        else:
            with buffer.agrs_new_session():
                _, handle = buffer.all_gather(torch.ones(4))
                handle()
    except tokenyard.PeerDied as error:
        return str(error)
    return "nobody died"
