"""Layout, notify, dispatch and combine of all ranks at once: `xs[r]` is rank r's tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenyard.topology import even_split
from tokenyard.types import Layout, split_range


@dataclass(frozen=True)
class World:
    """Where experts and ranks live.

    >>> World.even(num_experts=4, num_ranks=2)
    World(rank_of_expert=(0, 0, 1, 1), node_of_rank=(0, 0))
    """

    rank_of_expert: tuple[int, ...]
    node_of_rank: tuple[int, ...]

    @classmethod
    def even(cls, num_experts: int, num_ranks: int, ranks_per_node: int | None = None) -> World:
        per_node = ranks_per_node or num_ranks
        return cls(
            tuple(even_split(num_experts, num_ranks)),
            tuple(rank // per_node for rank in range(num_ranks)),
        )

    @property
    def num_ranks(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_experts(self) -> int:
        return len(self.rank_of_expert)

    @property
    def num_nodes(self) -> int:
        return max(self.node_of_rank) + 1

    def ranks_of(self, node: int) -> list[int]:
        return [rank for rank, home in enumerate(self.node_of_rank) if home == node]

    def experts_of(self, rank: int) -> list[int]:
        """Global ids, ascending; an expert's place in this list is its local id."""
        return [e for e, owner in enumerate(self.rank_of_expert) if owner == rank]


def layout(topk_idx: Tensor, world: World) -> Layout:
    """Which ranks get each token of one rank.

    -1 in topk_idx means no expert. A rank, and a node, gets a token once, however many of its
    experts the token chose. An expert counts every (token, k) pair.

    >>> world = World.even(num_experts=4, num_ranks=2)
    >>> got = layout(torch.tensor([[0, 1], [1, 3], [-1, 2]]), world)
    >>> got.is_token_in_rank.int().tolist()
    [[1, 0], [1, 1], [0, 1]]
    >>> got.num_tokens_per_rank.tolist(), got.num_tokens_per_expert.tolist()
    ([2, 2], [1, 2, 1, 1])
    """
    num_tokens = topk_idx.shape[0]
    in_rank = torch.zeros(num_tokens, world.num_ranks, dtype=torch.bool)
    in_node = torch.zeros(num_tokens, world.num_nodes, dtype=torch.bool)
    per_expert = torch.zeros(world.num_experts, dtype=torch.int32)
    for token, experts in enumerate(topk_idx.tolist()):
        for expert in experts:
            if expert == -1:
                continue
            rank = world.rank_of_expert[expert]
            in_rank[token, rank] = True
            in_node[token, world.node_of_rank[rank]] = True
            per_expert[expert] += 1
    return Layout(
        num_tokens_per_rank=in_rank.sum(0).int(),
        num_tokens_per_node=in_node.sum(0).int() if world.num_nodes > 1 else None,
        num_tokens_per_expert=per_expert,
        is_token_in_rank=in_rank,
    )


@dataclass(frozen=True, kw_only=True)
class Notice:
    """What one rank knows after ranks have exchanged their counts."""

    rank_prefix_matrix: Tensor  # [R, R] int32: rows that rank j gets from ranks 0..i
    channel_prefix_matrix: Tensor  # [R, C] int32: rows for rank i of this rank's channels 0..c
    recv_channel_prefix_matrix: Tensor  # [R, C] int32: rows from rank i's channels before c
    send_head: Tensor  # [T, R] int32: the row's place among its channel's, -1 where not sent


def notify(layouts: Sequence[Layout], num_channels: int) -> list[Notice]:
    """How much arrives from whom, as prefix sums.

    Two ranks with three tokens each and two channels (tokens 0 and 1, then token 2):

    >>> world = World.even(num_experts=2, num_ranks=2)
    >>> topk_idxs = [torch.tensor([[0], [1], [1]]), torch.tensor([[1], [1], [0]])]
    >>> first, second = notify([layout(t, world) for t in topk_idxs], num_channels=2)
    >>> first.rank_prefix_matrix.tolist()  # rank 0 gets 1 + 1 rows, rank 1 gets 2 + 2
    [[1, 2], [2, 4]]
    >>> first.channel_prefix_matrix.tolist()  # rank 0 sends itself token 0, rank 1 tokens 1 and 2
    [[1, 1], [1, 2]]
    >>> second.recv_channel_prefix_matrix.tolist()  # rank 1 gets one row of each channel, then two
    [[0, 1], [0, 2]]
    >>> first.send_head.tolist()
    [[0, -1], [-1, 0], [-1, 0]]
    """
    num_ranks = len(layouts)
    rank_prefix = torch.zeros(num_ranks, num_ranks, dtype=torch.int32)
    for source in range(num_ranks):
        before = rank_prefix[source - 1] if source else 0
        rank_prefix[source] = before + layouts[source].num_tokens_per_rank

    # in_channel[source][destination][channel]
    in_channel = torch.zeros(num_ranks, num_ranks, num_channels, dtype=torch.int32)
    heads = []
    for source, lay in enumerate(layouts):
        head = torch.full(lay.is_token_in_rank.shape, -1, dtype=torch.int32)
        for channel, (begin, end) in enumerate(
            split_range(len(lay.is_token_in_rank), num_channels)
        ):
            for token in range(begin, end):
                for rank, sent in enumerate(lay.is_token_in_rank[token].tolist()):
                    if sent:
                        head[token, rank] = in_channel[source, rank, channel]
                        in_channel[source, rank, channel] += 1
        heads.append(head)

    inclusive = in_channel.cumsum(2).int()
    exclusive = inclusive - in_channel
    return [
        Notice(
            rank_prefix_matrix=rank_prefix,
            channel_prefix_matrix=inclusive[rank],
            recv_channel_prefix_matrix=exclusive[:, rank].clone(),
            send_head=heads[rank],
        )
        for rank in range(num_ranks)
    ]


class Received(NamedTuple):
    """What dispatch brings to one rank: N rows by (source rank, token)."""

    x: Tensor  # [N, D]
    scales: Tensor | None  # [N, S]; FP8 only
    topk_idx: Tensor | None  # [N, K] int64, local expert ids, -1 where the expert is elsewhere
    topk_weights: Tensor | None  # [N, K] float32, 0.0 where topk_idx is -1
    src_idx: Tensor  # [N] int32, the token's index on its source rank
    num_tokens_per_expert: list[int]  # L, rounded up to expert_alignment


def dispatch(
    xs: Sequence[Tensor],
    layouts: Sequence[Layout],
    world: World,
    *,
    topk_idxs: Sequence[Tensor] | None = None,
    topk_weights: Sequence[Tensor] | None = None,
    scales: Sequence[Tensor] | None = None,
    expert_alignment: int = 1,
) -> list[Received]:
    """Every rank gets its rows, ordered by (source rank, token), with local expert ids.

    >>> world = World.even(num_experts=4, num_ranks=2)
    >>> topk_idxs = [torch.tensor([[0, 3]]), torch.tensor([[1, -1], [2, 3]])]
    >>> weights = [torch.tensor([[0.25, 0.75]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])]
    >>> xs = [torch.tensor([[10.0]]), torch.tensor([[20.0], [21.0]])]
    >>> first, second = dispatch(xs, [layout(t, world) for t in topk_idxs], world,
    ...                          topk_idxs=topk_idxs, topk_weights=weights)
    >>> first.x.tolist(), second.x.tolist()
    ([[10.0], [20.0]], [[10.0], [21.0]])
    >>> second.topk_idx.tolist(), second.topk_weights.tolist()  # experts 2 and 3 are 0 and 1 there
    ([[-1, 1], [0, 1]], [[0.0, 0.75], [0.5, 0.5]])
    >>> second.src_idx.tolist(), second.num_tokens_per_expert
    ([0, 1], [1, 2])
    """
    received = []
    for rank in range(world.num_ranks):
        rows = _rows_to(rank, layouts)
        own = world.experts_of(rank)
        local_idx = local_weights = None
        if topk_idxs is not None:
            assert topk_weights is not None
            local_idx = torch.full((len(rows), topk_idxs[0].shape[1]), -1, dtype=torch.int64)
            local_weights = torch.zeros(local_idx.shape, dtype=torch.float32)
            for row, (source, token) in enumerate(rows):
                for k, expert in enumerate(topk_idxs[source][token].tolist()):
                    if expert in own:
                        local_idx[row, k] = own.index(expert)
                        local_weights[row, k] = topk_weights[source][token, k]
        counts = [sum(int(lay.num_tokens_per_expert[e]) for lay in layouts) for e in own]
        received.append(
            Received(
                x=_gather(xs, rows),
                scales=None if scales is None else _gather(scales, rows),
                topk_idx=local_idx,
                topk_weights=local_weights,
                src_idx=torch.tensor([token for _, token in rows], dtype=torch.int32),
                num_tokens_per_expert=[
                    -(-n // expert_alignment) * expert_alignment for n in counts
                ],
            )
        )
    return received


def combine(
    ys: Sequence[Tensor],
    layouts: Sequence[Layout],
    world: World,
    *,
    biases: Sequence[Sequence[Tensor]] | None = None,
) -> list[Tensor]:
    """Every token gets the sum of its rows, without weights.

    On one node: start from the biases, add the rows by ascending rank in float32 (float64 for
    float64), and round once. On several nodes: sum each node's rows by ascending rank and round
    that to the rows' dtype; then start from the biases, add these sums by ascending node, and
    round. A token that was sent to no rank gets its bias, or 0.

    In bfloat16 256 + 1 is 256. On one node 256 + 1 + 1 is rounded once, to 258. If the 256 has a
    node of its own, the two others first add up to 2. If it shares a node with a 1, that 1 is lost:

    >>> def sum_of(values, node_of_rank):
    ...     world = World((0, 1, 2), node_of_rank)
    ...     idle = torch.zeros(0, 3, dtype=torch.int64)
    ...     layouts = [layout(t, world) for t in (torch.tensor([[0, 1, 2]]), idle, idle)]
    ...     rows = [torch.tensor([[value]], dtype=torch.bfloat16) for value in values]
    ...     return combine(rows, layouts, world)
    >>> sum_of([256, 1, 1], (0, 0, 0))[0].item()
    258.0
    >>> sum_of([256, 1, 1], (0, 1, 1))[0].item()
    258.0
    >>> sum_of([256, 1, 1], (0, 0, 1))[0].item()
    256.0
    """
    dtype = ys[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # place[rank][(source, token)] is the row of ys[rank] that holds that token
    place = [
        {row: n for n, row in enumerate(_rows_to(rank, layouts))} for rank in range(world.num_ranks)
    ]
    nodes = [world.ranks_of(node) for node in range(world.num_nodes)]
    combined = []
    for source, lay in enumerate(layouts):
        num_tokens = lay.is_token_in_rank.shape[0]
        out = torch.zeros(num_tokens, ys[0].shape[1], dtype=dtype)
        for token in range(num_tokens):
            total = torch.zeros(ys[0].shape[1], dtype=wide)
            for bias in biases[source] if biases is not None else ():
                total = total + bias[token].to(wide)
            for ranks in nodes:
                partial = total if len(nodes) == 1 else torch.zeros_like(total)
                for rank in ranks:
                    if (source, token) in place[rank]:
                        partial = partial + ys[rank][place[rank][source, token]].to(wide)
                total = partial if len(nodes) == 1 else total + partial.to(dtype).to(wide)
            out[token] = total.to(dtype)
        combined.append(out)
    return combined


def dispatch_backward(
    grad_recv_xs: Sequence[Tensor], layouts: Sequence[Layout], world: World
) -> list[Tensor]:
    """The gradient of dispatch is combine: rows are copies of a token, so their gradients add up.

    The gradient of topk_weights is the same sum: dispatch copied a weight to one rank, and sent 0.0
    to the others.

    >>> world = World.even(num_experts=2, num_ranks=2)
    >>> layouts = [layout(torch.tensor([[0, 1]]), world), layout(torch.tensor([[1, -1]]), world)]
    >>> grads = [torch.tensor([[1.0]]), torch.tensor([[10.0], [7.0]])]
    >>> [g.tolist() for g in dispatch_backward(grads, layouts, world)]
    [[[11.0]], [[7.0]]]
    """
    return combine(grad_recv_xs, layouts, world)


def combine_backward(
    grad_outs: Sequence[Tensor], layouts: Sequence[Layout], world: World
) -> list[Tensor]:
    """The gradient of combine is dispatch: every row of a sum gets the sum's gradient.

    (The gradient of a bias is grad_out itself.)

    >>> world = World.even(num_experts=2, num_ranks=2)
    >>> layouts = [layout(torch.tensor([[0, 1]]), world), layout(torch.tensor([[1, -1]]), world)]
    >>> grads = [torch.tensor([[5.0]]), torch.tensor([[3.0]])]
    >>> [g.tolist() for g in combine_backward(grads, layouts, world)]
    [[[5.0]], [[5.0], [3.0]]]
    """
    return [received.x for received in dispatch(grad_outs, layouts, world)]


def _rows_to(rank: int, layouts: Sequence[Layout]) -> list[tuple[int, int]]:
    """(source rank, token) of every row that `rank` gets, in order."""
    return [
        (source, token)
        for source, lay in enumerate(layouts)
        for token, is_sent in enumerate(lay.is_token_in_rank[:, rank].tolist())
        if is_sent
    ]


def _gather(xs: Sequence[Tensor], rows: list[tuple[int, int]]) -> Tensor:
    if not rows:
        return xs[0].new_empty(0, xs[0].shape[1])
    return torch.stack([xs[source][token] for source, token in rows])
