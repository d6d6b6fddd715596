"""Expert parallelism by one all-to-all of (token, expert) pairs: what to beat.

The scheme of transformers' AllToAllEP, from its description: pairs are sorted by
expert, ranks tell each other how many they send for each expert, and every pair's row is sent to
its expert's rank, so that a token goes there as often as it chose experts there.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class PerExpert:
    def __init__(self, group: dist.ProcessGroup, x: Tensor, topk_idx: Tensor, num_experts: int):
        self.group, self.x, self.topk_idx, self.num_experts = group, x, topk_idx, num_experts

    def dispatch(self) -> tuple[Tensor, Tensor]:
        """Rows that arrived, by (source rank, expert, token), and pairs [source rank, expert]."""
        ranks = self.group.size()
        expert, order = self.topk_idx.flatten().sort(stable=True)
        sent = torch.bincount(expert, minlength=self.num_experts).view(ranks, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        rows = self.x[order // self.topk_idx.shape[1]]
        counts, out_counts = sent.sum(1).tolist(), received.sum(1).tolist()
        out = rows.new_empty(sum(out_counts), rows.shape[1])
        dist.all_to_all_single(out, rows, out_counts, counts, group=self.group)
        return out, received
