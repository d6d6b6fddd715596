import torch
import tokenyard

group = tokenyard.local_group()  # of torchrun, or this process alone
x = torch.randn(4, 8)  # this rank's tokens
topk_weights, topk_idx = torch.rand(4, 16).topk(2)  # a router: 2 of 16 experts a token
with tokenyard.Buffer(group) as buffer:
    got = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=topk_weights, num_experts=16)
    by_expert = got.num_recv_tokens_per_expert_list
    print(f"rank {buffer.rank}: {len(got.recv_x)} rows, {by_expert} by expert")
    y = got.recv_x * got.recv_topk_weights.sum(1, keepdim=True)  # experts that do y = weight * x
    out = buffer.combine(y, got.handle).x
right = torch.allclose(out, x * topk_weights.sum(1, keepdim=True), atol=1e-6)
print(f"rank {buffer.rank}: combine gave back the right sums: {right}")
