import torch, torch.distributed as dist
import tokenyard

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.randn(4, 8)  # this rank's tokens
topk_weights, topk_idx = torch.rand(4, 16).topk(2)  # a router: 2 of 16 experts a token
with tokenyard.Buffer(dist.group.WORLD) as buffer:
    got = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=topk_weights, num_experts=16)
    print(f"rank {rank}: {len(got.recv_x)} rows, {got.num_recv_tokens_per_expert_list} by expert")
    y = got.recv_x * got.recv_topk_weights.sum(1, keepdim=True)  # experts that do y = weight * x
    out = buffer.combine(y, got.handle).x
right = torch.allclose(out, x * topk_weights.sum(1, keepdim=True), atol=1e-6)
print(f"rank {rank}: combine gave back the right sums: {right}")
dist.destroy_process_group()
