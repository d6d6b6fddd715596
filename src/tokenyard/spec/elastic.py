"""DeepEP V2's dispatch and combine, of all ranks at once: `xs[r]` is rank r's tensor.

A *lane* is a place among a token's top-k choices. What one rank sends back for a token is added at
the last lane that has an expert of that rank; what a node sends back, at the last lane of the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tokenyard.spec.by_expert import dispatch_by_expert
from tokenyard.spec.exchange import World, dispatch, layout
from tokenyard.types import round_up

Term = tuple[int, int, Tensor]  # the lane, the rank, and the row that is added there


@dataclass(frozen=True, kw_only=True, eq=False)
class ElasticReceived:
    """What one rank gets. N rows come, one a token; expanded they become M, one a (token, k)."""

    x: Tensor  # [N, D], or [M, D]: those of `dispatch`, or those of `dispatch_by_expert`
    scales: Tensor | None  # [N, S], or [M, S]
    topk_idx: Tensor | None  # [N, K], local ids, -1 where the expert is elsewhere; None if expanded
    topk_weights: Tensor  # [N, K], 0.0 where topk_idx is -1; expanded [M], 0.0 in padding
    num_recv_tokens_per_expert_list: list[int]  # L, aligned; empty without do_cpu_sync
    psum_num_recv_tokens_per_scaleup_rank: Tensor  # [S] int32
    psum_num_recv_tokens_per_expert: Tensor  # [L] int32
    num_unaligned_recv_tokens_per_expert: Tensor  # [L] int32
    recv_src_metadata: Tensor  # [N, 2 + K] int32


def elastic_dispatch(
    xs: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    world: World,
    *,
    topk_weights: Sequence[Tensor],
    num_max_tokens_per_rank: int,
    num_scaleup_ranks: int,
    scales: Sequence[Tensor] | None = None,
    expert_alignment: int = 1,
    do_expand: bool = False,
    do_cpu_sync: bool = True,
) -> list[ElasticReceived]:
    """Every rank gets its rows: compact as `dispatch` brings them, or expanded as
    `dispatch_by_expert` does. What it gets beside them:

        psum_num_recv_tokens_per_scaleup_rank  rows from ranks 0..s of a node, rank r counting as
                                               r % S
        psum_num_recv_tokens_per_expert        compact: aligned counts of experts 0..e; expanded:
                                               where expert e's rows end, without their padding
        recv_src_metadata                      of each row the token, numbered over all ranks with
                                               num_max_tokens_per_rank numbers a rank; its rank's
                                               place in the node times K, plus the last lane of this
                                               rank; and each lane's expanded row, or -1

    Without do_cpu_sync there are as many rows as could come: zeros, and -1 among numbers, follow
    those that do.

    >>> world = World.even(num_experts=4, num_ranks=2)
    >>> topk_idxs = [torch.tensor([[0, 3]]), torch.tensor([[1, -1], [2, 3]])]
    >>> weights = [torch.tensor([[0.25, 0.75]]), torch.tensor([[1.0, 0.0], [0.5, 0.6]])]
    >>> xs = [torch.tensor([[10.0]]), torch.tensor([[20.0], [21.0]])]
    >>> _, second = elastic_dispatch(xs, topk_idxs, world, topk_weights=weights, do_expand=True,
    ...     num_max_tokens_per_rank=100, num_scaleup_ranks=2, expert_alignment=2)
    >>> second.x.flatten().tolist(), second.topk_weights.tolist()
    ([21.0, 0.0, 10.0, 21.0], [0.5, 0.0, 0.75, 0.6000000238418579])
    >>> second.psum_num_recv_tokens_per_expert.tolist()
    [1, 4]
    >>> second.recv_src_metadata.tolist()  # token 0 of rank 0, and token 1 of rank 1
    [[0, 1, -1, 2], [101, 3, 0, 3]]
    """
    num_ranks, num_topk = world.num_ranks, topk_idxs[0].shape[1]
    layouts = [layout(topk_idx, world) for topk_idx in topk_idxs]
    compact = dispatch(
        xs, layouts, world, topk_idxs=topk_idxs, topk_weights=topk_weights, scales=scales
    )
    expanded = dispatch_by_expert(
        xs, topk_idxs, world, scales=scales, expert_alignment=expert_alignment
    )
    received = []
    for rank, (rows, pairs) in enumerate(zip(compact, expanded, strict=True)):
        assert rows.topk_idx is not None
        assert rows.topk_weights is not None
        from_rank = [int(one.num_tokens_per_rank[rank]) for one in layouts]
        tokens = [(source, n) for source, count in enumerate(from_rank) for n in range(count)]
        row_of = {pair: row for row, pair in enumerate(pairs.pairs) if pair is not None}
        metadata = torch.full((len(tokens), 2 + num_topk), -1, dtype=torch.int32)
        weights = torch.zeros(len(pairs.pairs), dtype=torch.float32)
        for row, (source, _) in enumerate(tokens):
            token = int(rows.src_idx[row])
            own = [k for k in range(num_topk) if rows.topk_idx[row, k] >= 0]
            metadata[row, 0] = source * num_max_tokens_per_rank + token
            metadata[row, 1] = source % num_scaleup_ranks * num_topk + own[-1]
            for k in own if do_expand else ():
                metadata[row, 2 + k] = row_of[source, token, k]
                weights[row_of[source, token, k]] = topk_weights[source][token, k]
        counts = rows.num_tokens_per_expert
        aligned = [round_up(count, expert_alignment) for count in counts]
        ends = list(accumulate(aligned))
        psum = ends
        if do_expand:
            psum = [end - size + count for end, size, count in zip(ends, aligned, counts)]
        room_N, room = len(tokens), len(pairs.pairs) if do_expand else len(tokens)
        if not do_cpu_sync:
            room_N = num_ranks * num_max_tokens_per_rank
            most = room_N * min(num_topk, len(counts)) + (expert_alignment - 1) * len(counts)
            # Expanded, more where a token names an expert twice.
            room = max(round_up(most, expert_alignment), room) if do_expand else room_N
        from_place = [
            sum(from_rank[place::num_scaleup_ranks]) for place in range(num_scaleup_ranks)
        ]
        x, sf = (pairs.x, pairs.scales) if do_expand else (rows.x, rows.scales)
        received.append(
            ElasticReceived(
                x=_extend(x, room, 0),
                scales=None if sf is None else _extend(sf, room, 0),
                topk_idx=None if do_expand else _extend(rows.topk_idx, room, -1),
                topk_weights=_extend(weights if do_expand else rows.topk_weights, room, 0),
                num_recv_tokens_per_expert_list=aligned if do_cpu_sync else [],
                psum_num_recv_tokens_per_scaleup_rank=_ints(accumulate(from_place)),
                psum_num_recv_tokens_per_expert=_ints(psum),
                num_unaligned_recv_tokens_per_expert=_ints(counts),
                recv_src_metadata=_extend(metadata, room_N, -1),
            )
        )
    return received


def elastic_combine(
    ys: Sequence[Tensor],
    received: Sequence[ElasticReceived],
    topk_idxs: Sequence[Tensor],
    world: World,
    *,
    num_max_tokens_per_rank: int,
    do_expand: bool = False,
    by_node: bool = False,
    allow_multiple_reduction: bool = True,
    biases: Sequence[Sequence[Tensor]] | None = None,
    topk_weights: Sequence[Tensor] | None = None,
) -> list[tuple[Tensor, Tensor | None]]:
    """Every token gets the sum of its rows, in this order:

    1. Expanded, each rank sums a token's rows by ascending lane, from 0, and rounds the sum to the
       rows' dtype. (Without allow_multiple_reduction it does not, and step 3 sums all rows.)
    2. `by_node`, which is hybrid mode on several nodes, and only with allow_multiple_reduction: the
       ranks' rows of each node are summed, by last lane, from 0, and rounded.
    3. From the biases, what is left is summed by last lane, and rounded.

    Sums are in float32 (float64 for float64). Weights are not summed: [t, k] is that of the rank
    that owns the expert, 0.0 where there is none. (It is added to 0.0, so -0.0 comes back as 0.0.)

    In bfloat16 256 + 1 is 256. Ranks are added by last lane, here 1, 2 and then 0:

    >>> def sum_of(experts, node_of_rank, by_node):
    ...     world = World((0, 1, 2), node_of_rank)
    ...     idle, none = torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3)
    ...     topk_idxs = [torch.tensor([experts]), idle, idle]
    ...     weights, xs = [torch.ones(1, 3), none, none], [torch.zeros(n, 1) for n in (1, 0, 0)]
    ...     got = elastic_dispatch(xs, topk_idxs, world, topk_weights=weights,
    ...         num_max_tokens_per_rank=1, num_scaleup_ranks=1)
    ...     ys = [torch.tensor([[value]]).bfloat16() for value in (256.0, 1.0, 1.0)]
    ...     return elastic_combine(ys, got, topk_idxs, world, num_max_tokens_per_rank=1,
    ...         by_node=by_node)[0][0].item()
    >>> sum_of([1, 2, 0], (0, 0, 0), by_node=False)
    258.0
    >>> sum_of([1, 2, 0], (0, 1, 0), by_node=True)  # node 1 sends 1, node 0 rounds 1 + 256
    256.0
    """
    dtype = ys[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    row_of = [
        {number: row for row, number in enumerate(got.recv_src_metadata[:, 0].tolist())}
        for got in received
    ]
    combined = []
    for source, topk_idx in enumerate(topk_idxs):
        out = torch.zeros(topk_idx.shape[0], ys[0].shape[1], dtype=dtype)
        picked = torch.zeros(topk_idx.shape, dtype=torch.float32)
        for token, experts in enumerate(topk_idx.tolist()):
            number = source * num_max_tokens_per_rank + token
            terms: list[Term] = []
            for lane, expert in enumerate(experts):
                if expert == -1:
                    continue
                rank = world.rank_of_expert[expert]
                row = row_of[rank][number]
                place = received[rank].recv_src_metadata[row, 2 + lane] if do_expand else row
                if topk_weights is not None:
                    weight = topk_weights[rank][place]
                    picked[token, lane] += weight if do_expand else weight[lane]
                terms.append((lane, rank, ys[rank][place]))
            if not do_expand:
                terms = [max(t for t in terms if t[1] == rank) for rank in {t[1] for t in terms}]
            elif allow_multiple_reduction:
                terms = _sum_groups(terms, range(world.num_ranks), wide)
            if by_node and allow_multiple_reduction:
                terms = _sum_groups(terms, world.node_of_rank, wide)
            total = torch.zeros(ys[0].shape[1], dtype=wide)
            for bias in biases[source] if biases is not None else ():
                total = total + bias[token].to(wide)
            for _, _, term in sorted(terms, key=_lane):
                total = total + term.to(wide)
            out[token] = total.to(dtype)
        combined.append((out, None if topk_weights is None else picked))
    return combined


def _sum_groups(terms: list[Term], group_of_rank: Sequence[int], wide: torch.dtype) -> list[Term]:
    """One term for each group of ranks: the sum of its rows, rounded, at the group's last lane."""
    sums: dict[int, Term] = {}
    for group in {group_of_rank[rank] for _, rank, _ in terms}:
        own = sorted([term for term in terms if group_of_rank[term[1]] == group], key=_lane)
        total = torch.zeros(own[0][2].shape, dtype=wide)
        for _, _, row in own:
            total = total + row.to(wide)
        lane, rank, row = own[-1]
        sums[group] = lane, rank, total.to(row.dtype)
    return list(sums.values())


def _lane(term: Term) -> int:
    return term[0]


def _extend(rows: Tensor, num_rows: int, value: int) -> Tensor:
    more = torch.zeros(num_rows - rows.shape[0], *rows.shape[1:], dtype=rows.dtype)
    if value:
        more.fill_(value)
    return torch.cat([rows, more])


def _ints(values: object) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)  # type: ignore[call-overload]
