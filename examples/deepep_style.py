"""Code written for DeepEP V1: besides the device, only the import was changed.

torchrun --nproc-per-node 4 examples/deepep_style.py
"""

import torch
import torch.distributed as dist

import tokenyard as deep_ep

NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_TOKENS = 16, 4, 256, 64

_buffer: deep_ep.Buffer | None = None
deep_ep.Buffer.set_num_sms(24)


def get_buffer(group: dist.ProcessGroup, hidden_bytes: int) -> deep_ep.Buffer:
    """One Buffer for the process, as large as both directions ask for."""
    global _buffer
    num_nvl_bytes = num_rdma_bytes = 0
    for config in (
        deep_ep.Buffer.get_dispatch_config(group.size()),
        deep_ep.Buffer.get_combine_config(group.size()),
    ):
        nvl = config.get_nvl_buffer_size_hint(hidden_bytes, group.size())
        rdma = config.get_rdma_buffer_size_hint(hidden_bytes, group.size())
        num_nvl_bytes, num_rdma_bytes = max(nvl, num_nvl_bytes), max(rdma, num_rdma_bytes)
    if _buffer is None or _buffer.group != group or _buffer.num_nvl_bytes < num_nvl_bytes:
        _buffer = deep_ep.Buffer(group, num_nvl_bytes, num_rdma_bytes)
    return _buffer


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    rank = group.rank()
    torch.manual_seed(rank)
    x = torch.randn(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16)
    scores = torch.randn(NUM_TOKENS, NUM_EXPERTS).softmax(dim=1)
    topk_weights, topk_idx = scores.topk(NUM_TOPK, dim=1)
    topk_idx = topk_idx.to(deep_ep.topk_idx_t)
    buffer = get_buffer(group, HIDDEN * 2)

    # layout, then dispatch, chained by events
    previous = deep_ep.Buffer.capture()
    num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, in_rank, event = (
        buffer.get_dispatch_layout(
            topk_idx,
            NUM_EXPERTS,
            previous_event=previous,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
    )
    recv_x, recv_topk_idx, recv_topk_weights, recv_per_expert, handle, event = buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens_per_rank=num_tokens_per_rank,
        num_tokens_per_rdma_rank=num_tokens_per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=num_tokens_per_expert,
        previous_event=event,
        async_finish=True,
        allocate_on_comm_stream=True,
    )
    event.current_stream_wait()
    assert isinstance(recv_x, torch.Tensor)  # and not FP8 with its scales
    rank_prefix_matrix = handle[0]
    assert rank_prefix_matrix[-1, rank] == recv_x.size(0)
    assert sum(recv_per_expert) == (recv_topk_idx != -1).sum()

    # experts: each multiplies by its weight
    y = (recv_x.float() * recv_topk_weights.sum(1, keepdim=True)).to(torch.bfloat16)

    # combine
    combined_x, combined_weights, event = buffer.combine(
        y, handle, topk_weights=recv_topk_weights, async_finish=True, previous_event=event
    )
    event.current_stream_wait()
    assert torch.equal(combined_weights, topk_weights)
    want = x.float() * topk_weights.sum(1, keepdim=True)
    error = (combined_x.float() - want).abs().max().item()

    # a cached dispatch, as in the backward pass of combine
    grad_y = buffer.dispatch(x, handle=handle).recv_x
    assert isinstance(grad_y, torch.Tensor)
    assert torch.equal(grad_y, recv_x)

    print(f"rank {rank}: {recv_x.size(0)} rows, largest error of combine {error:.4f}", flush=True)
    assert error < 0.05  # each row, and the sum, is rounded to bfloat16 once
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
