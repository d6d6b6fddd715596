"""What an ElasticBuffer says of itself, takes and refuses."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch

import tokenyard
from tokenyard import EPHandle
from tokenyard.errors import BufferClosed, CallMismatch, PeerInputError
from tokenyard.testing import assert_same, routing, run_virtual

NUM_EXPERTS, NUM_TOPK, HIDDEN = 8, 4, 128


def given(rank: int, num_tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(rank))
    return x.bfloat16(), *routing("uniform", num_tokens, NUM_TOPK, NUM_EXPERTS, seed=rank)


def open_buffer(group: Any, **more: Any) -> tokenyard.ElasticBuffer:
    return tokenyard.ElasticBuffer(group, num_max_tokens_per_rank=8, **more)


def test_what_it_says_of_itself() -> None:
    def job(group: Any) -> None:
        hint = tokenyard.ElasticBuffer.get_buffer_size_hint(group, 8, HIDDEN, NUM_TOPK)
        assert hint > 0
        assert hint % (2 << 20) == 0
        with tokenyard.ElasticBuffer(group, None, 0, 8, HIDDEN, NUM_TOPK, ranks_per_node=2) as one:
            assert one.num_bytes == hint
            assert (one.rank_idx, one.num_ranks) == (group.rank(), 4)
            assert one.get_physical_domain_size() == one.get_logical_domain_size() == (2, 2)
            assert (one.scaleout_rank_idx, one.scaleup_rank_idx) == divmod(group.rank(), 2)
            assert (one.num_rdma_ranks, one.num_nvlink_ranks) == (2, 2)
            assert one.get_theoretical_num_sms(None, NUM_TOPK) % 2 == 0
            assert one.get_theoretical_num_qps(20) <= one.num_allocated_qps
            assert one.group is group
            assert one.num_max_tokens_per_rank == 8
            assert "rank" in repr(one)
        with open_buffer(group, num_bytes=123, ranks_per_node=2, allow_hybrid_mode=False) as one:
            assert one.num_bytes == 123
            assert one.get_logical_domain_size() == (1, 4)
            assert one.runtime is not None
        assert one.runtime is None
        with open_buffer(group, ranks_per_node=(3, 1)) as one:
            assert one.get_physical_domain_size() == (1, 4)

    run_virtual(job, 4)


def test_destroyed() -> None:
    def job(group: Any) -> None:
        buffer = open_buffer(group, explicitly_destroy=True)
        buffer.destroy()
        assert "closed" in repr(buffer)
        with pytest.raises(BufferClosed, match="closed"):
            buffer.dispatch(*given(0), num_experts=NUM_EXPERTS)

    run_virtual(job, 1)


def test_handle_is_plain() -> None:
    """Its fields can be read, set, copied and pickled; topk_idx is a copy, or the tensor itself."""

    def job(group: Any) -> None:
        with open_buffer(group) as buffer:
            x, topk_idx, weights = given(buffer.rank)
            got: Any = buffer.dispatch(x, topk_idx, weights, num_experts=NUM_EXPERTS)
            handle = got.handle
            assert handle.topk_idx.data_ptr() != topk_idx.data_ptr()
            assert handle.num_sms == 20
            assert handle.token_metadata_at_forward is handle.channel_linked_list is None
            assert handle.dst_buffer_slot_idx.shape == topk_idx.shape
            assert "compact" in repr(handle)
            want = buffer.combine(got.recv_x, handle).combined_x
            for one in (copy.copy(handle), pickle.loads(pickle.dumps(handle))):
                assert_same(buffer.combine(got.recv_x, one).combined_x, want)
                assert_same(one.recv_src_metadata, handle.recv_src_metadata)
            fields = dict(vars(handle))
            for name, value in fields.items():
                if isinstance(value, torch.Tensor):
                    setattr(handle, name, value.clone())
            assert_same(buffer.combine(got.recv_x, handle).combined_x, want)
            with pytest.raises(AttributeError, match="no attribute 'nothing'"):
                handle.nothing  # noqa: B018
            same: Any = buffer.dispatch(
                x, topk_idx, weights, num_experts=NUM_EXPERTS, do_handle_copy=False
            )
            assert same.handle.topk_idx.data_ptr() == topk_idx.data_ptr()

    run_virtual(job, 2)


@pytest.mark.parametrize("transport", ["direct", "collective"])
def test_handle_of_another_buffer(transport: str) -> None:
    """As when a caller replaces a buffer that has become too small."""

    def job(group: Any) -> None:
        with (
            open_buffer(group, transport=transport) as old,
            open_buffer(group, transport=transport) as new,
        ):
            given_here = given(old.rank)
            got: Any = old.dispatch(*given_here, num_experts=NUM_EXPERTS, do_expand=True)
            want = old.combine(got.recv_x, got.handle).combined_x
            assert_same(new.combine(got.recv_x, got.handle).combined_x, want)
            again: Any = new.dispatch(given_here[0], handle=got.handle, do_expand=True)
            assert_same(again.recv_x, got.recv_x)

    run_virtual(job, 2)


def test_scales_by_column() -> None:
    def job(group: Any) -> None:
        with open_buffer(group) as buffer:
            x, topk_idx, weights = given(buffer.rank)
            pair = tokenyard.per_token_cast_to_fp8(x)
            how: Any = {"num_experts": NUM_EXPERTS, "do_expand": True, "expert_alignment": 3}
            rows: Any = buffer.dispatch(pair, topk_idx, weights, **how)
            columns: Any = buffer.dispatch(
                pair, topk_idx, weights, **how, use_tma_aligned_col_major_sf=True
            )
            num_rows = rows.recv_x[1].shape[0]
            assert columns.recv_x[1].stride() == (1, -(-num_rows // 4) * 4)
            assert_same(columns.recv_x[1].contiguous(), rows.recv_x[1])

    run_virtual(job, 2)


def test_statistics_add_up() -> None:
    def job(group: Any) -> list[int]:
        with open_buffer(group) as buffer:
            x, topk_idx, weights = given(buffer.rank)
            stats = torch.zeros(NUM_EXPERTS // 2, dtype=torch.int32)
            for do_expand in (False, True):
                buffer.dispatch(
                    x,
                    topk_idx,
                    weights,
                    stats,
                    NUM_EXPERTS,
                    expert_alignment=16,
                    do_expand=do_expand,
                )
            return stats.tolist()

    counted = [number for part in run_virtual(job, 2).results for number in part]
    chosen = torch.cat([given(rank)[1].flatten() for rank in range(2)])
    assert counted == (2 * torch.bincount(chosen, minlength=NUM_EXPERTS)).tolist()


def test_events_and_weights_may_be_left_out() -> None:
    def job(group: Any) -> None:
        with open_buffer(group) as buffer:
            x, topk_idx, _ = given(buffer.rank)
            event = buffer.capture()
            got: Any = buffer.dispatch(
                x,
                topk_idx,
                num_experts=NUM_EXPERTS,
                previous_event=event,
                async_with_compute_stream=True,
                allocate_on_comm_stream=True,
            )
            got.event.current_stream_wait()
            assert got.recv_topk_weights is None
            back = buffer.combine(
                got.recv_x, got.handle, previous_event=event, async_with_compute_stream=True
            )
            back.event.current_stream_wait()
            assert back.combined_topk_weights is None
            again: Any = buffer.dispatch(x, handle=got.handle)
            assert again.event.event is None
            assert again.recv_topk_weights is None
            assert_same(again.recv_topk_idx, got.recv_topk_idx)
            buffer.barrier(use_comm_stream=False, with_cpu_sync=True)

    run_virtual(job, 2)


def test_without_num_max_tokens_per_rank() -> None:
    """Ranks know how many tokens each has, once they have counted."""

    def job(group: Any) -> None:
        with tokenyard.ElasticBuffer(group) as buffer:
            x, topk_idx, weights = given(buffer.rank, 3 + 2 * buffer.rank)
            got: Any = buffer.dispatch(x, topk_idx, weights, num_experts=NUM_EXPERTS)
            assert got.handle.num_max_tokens_per_rank == 5
            with pytest.raises((ValueError, PeerInputError), match="num_max_tokens_per_rank is 0"):
                buffer.dispatch(x, topk_idx, weights, num_experts=NUM_EXPERTS, do_cpu_sync=False)

    run_virtual(job, 2)


def test_bad_input_is_told_to_all_ranks() -> None:
    def job(group: Any) -> None:
        with open_buffer(group) as buffer:
            x, topk_idx, weights = given(buffer.rank)
            is_culprit = buffer.rank == 1
            routed: Any = {"topk_weights": weights, "num_experts": NUM_EXPERTS}
            got: Any = buffer.dispatch(x, topk_idx, **routed)
            wrong: list[tuple[str, Any, Any]] = [
                ("at most num_max", {"num_max_tokens_per_rank": 5}, {"num_max_tokens_per_rank": 8}),
                ("expert_alignment", {"expert_alignment": 0}, {}),
                ("stats", {"cumulative_local_expert_recv_stats": torch.zeros(3)}, {}),
                ("topk_idx", {"topk_idx": None}, {}),
            ]
            for match, bad, good in wrong:
                how = {"topk_idx": topk_idx} | routed | (bad if is_culprit else good)
                expected = ValueError if is_culprit else PeerInputError
                with pytest.raises(expected, match=match):
                    buffer.dispatch(x, **how)
            handles: list[tuple[str, Any]] = [
                ("num_experts", {"num_experts": 4}),
                ("topk_idx given", {"topk_idx": topk_idx}),
                ("do_cpu_sync", {"do_cpu_sync": True}),
                ("compact", {"do_expand": True}),
            ]
            for match, bad in handles:
                expected = ValueError if is_culprit else PeerInputError
                with pytest.raises(expected, match=match):
                    buffer.dispatch(x, handle=got.handle, **(bad if is_culprit else {}))
            rows: list[tuple[str, Any]] = [("handle", {"handle": None}), ("x has", {"x": x[:1]})]
            for match, bad in rows:
                how = {"x": got.recv_x, "handle": got.handle} | (bad if is_culprit else {})
                expected = ValueError if is_culprit else PeerInputError
                with pytest.raises(expected, match=match):
                    buffer.combine(**how)
            assert buffer.combine(got.recv_x, got.handle).combined_x.shape == x.shape

    run_virtual(job, 2)


@pytest.mark.parametrize("transport", ["direct", "collective"])
def test_ranks_that_differ(transport: str) -> None:
    def job(group: Any) -> None:
        with open_buffer(group, transport=transport) as buffer:
            x, topk_idx, weights = given(buffer.rank)
            with pytest.raises(CallMismatch, match="differ in num_max_tokens_per_rank: "):
                buffer.dispatch(
                    x,
                    topk_idx,
                    weights,
                    num_experts=NUM_EXPERTS,
                    num_max_tokens_per_rank=8 + buffer.rank,
                )
            expand = partial(
                buffer.dispatch, x, topk_idx, weights, num_experts=NUM_EXPERTS, do_expand=True
            )
            got: Any = [expand() for _ in range(2)]
            mine = got[buffer.rank]
            with pytest.raises(CallMismatch, match="differ in the handle"):
                buffer.combine(mine.recv_x, mine.handle)
            other = partial(buffer.dispatch, x, topk_idx, weights, num_experts=NUM_EXPERTS)
            with pytest.raises(CallMismatch, match="barrier"):
                (buffer.barrier if buffer.rank else other)()

    run_virtual(job, 2)


def test_handle_that_no_dispatch_made() -> None:
    def job(group: Any) -> None:
        with open_buffer(group) as buffer:
            x, topk_idx, _ = given(0)
            handle = EPHandle(False, NUM_EXPERTS, 1, 8, 20, topk_idx, 6, 6, [])
            assert handle.recv_src_metadata is None
            with pytest.raises(ValueError, match="want the EPHandle"):
                buffer.combine(x, handle)

    run_virtual(job, 1)


@pytest.mark.parametrize("num_topk", [2, 8])
def test_experts_that_a_token_names_twice(num_topk: int) -> None:
    """As dummy batches of zeros do: room for the worst has room for these, too."""

    def job(group: Any) -> None:
        with open_buffer(group) as buffer:
            x, ids = torch.full((8, 64), 7.0), torch.zeros(8, num_topk, dtype=torch.int64)
            got = buffer.dispatch(
                x,
                ids,
                torch.ones(8, num_topk),
                num_experts=2,
                do_expand=True,
                do_cpu_sync=False,
            )
            assert isinstance(got.recv_x, torch.Tensor)
            rows = got.handle.recv_src_metadata[:, 2:]
            assert got.recv_x.shape[0] > int(rows.max())
            assert bool((got.recv_x[rows[rows >= 0]] == 7).all())
            back, _, _ = buffer.combine(got.recv_x, got.handle)
            assert_same(back, num_topk * x)

    run_virtual(job, 2)
