"""What crosses the stages: layout -> notify -> dispatch -> combine.

The legend of shapes, used as suffixes of names everywhere (`topk_idx_TK` is [tokens, top-k]):

    T  tokens of this rank          R  ranks of the group      N  rows, see below
    K  experts chosen for a token   E  experts of all ranks    C  channels of the ring transport
    D  hidden size                  L  experts of one rank     B  bytes of a row

A *row* is one token on its way to one rank. A token whose experts live on three ranks is three
rows. Rows are ordered by (rank, token): by destination where they are sent, by source where they
arrive.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

topk_idx_t = torch.int64

# What a row can be made of. Their places in this tuple travel between ranks.
ROW_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
)
SCALE_DTYPES = (torch.float32, torch.int32)  # int32 holds four UE8M0 exponents


@dataclass(frozen=True)
class Config:
    """DeepEP's tuning knobs.

    A channel is a range of each rank's tokens that has rings of its own, one for each source:
    C = num_sms // 2, since DeepEP drives a channel with two SMs. Threads are something else: a call
    uses at most torch's number of threads, whatever num_sms is.

    The ring transport uses these channels and chunk sizes in the call that they are given to. It
    has rings for as many channels as Buffer.num_sms asked for when the Buffer was made, so a call
    uses no more than those. Other transports ignore them. All ranks give the same num_sms and
    num_max_nvl_chunked_recv_tokens, or a CallMismatch is raised.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    # A ring's slot has room for this many experts a token and scales a row, as in DeepEP.
    MAX_TOPK = 128
    MAX_SCALES = 128

    @property
    def num_channels(self) -> int:
        return max(1, self.num_sms // 2)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for a ring per (channel, source): its slots, and a line each for head and tail."""
        slot = hidden_bytes + self.MAX_TOPK * (8 + 4) + self.MAX_SCALES * 4 + 4
        ring = self.num_max_nvl_chunked_recv_tokens * slot + 2 * 64
        return round_up(self.num_channels * num_ranks * ring, 128)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Always 0: between nodes torch.distributed brings its own buffers."""
        return 0


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def split_range(num_items: int, num_parts: int) -> list[tuple[int, int]]:
    """Each part takes ceil(items / parts) consecutive items; the last parts may get none.

    >>> split_range(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    each = -(-num_items // num_parts)
    starts = (min(part * each, num_items) for part in range(num_parts))
    return [(begin, min(begin + each, num_items)) for begin in starts]


def digest(text: str) -> int:
    """A non-negative int64 that tells texts apart, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class Layout(NamedTuple):
    """Which ranks get each token, counted from topk_idx without communication.

    A NamedTuple, since making a frozen dataclass takes as long as computing a small layout.
    """

    num_tokens_per_rank: Tensor  # [R] int32, each token once a rank
    num_tokens_per_node: Tensor | None  # [nodes] int32, each token once a node; None on one node
    num_tokens_per_expert: Tensor  # [E] int32, counts (token, k) pairs
    is_token_in_rank: Tensor  # [T, R] bool


class Aligned(NamedTuple):
    """Flat indices into topk_ids by expert, each expert's share padded to whole blocks."""

    sorted_token_ids: Tensor  # [capacity] int32, topk_ids.numel() where padded or unused
    expert_ids: Tensor  # [capacity // block_size] int32, each block's expert, -1 where unused
    num_tokens_post_pad: Tensor  # [1] int32, the entries in use, padding included


class Places(NamedTuple):
    """Where each copy of a row goes when rows are grouped by local expert and padded."""

    row_of: Tensor  # [N, K] int64, -1 where topk_idx is -1
    offsets: Tensor  # [L] int32, the end of each group with its padding
    num_rows: int  # of all groups: the last offset


@dataclass(frozen=True, kw_only=True, eq=False)
class Permuted:
    """Received rows as a grouped GEMM wants them: one after the other by local expert.

    `row_of` is all that unpermute, and the gradients of permute and unpermute, need to know.
    """

    x: Tensor  # [M, D], padding rows are zeros
    scales: Tensor | None  # [M, S], padding rows are zeros
    row_of: Tensor  # [N, K] int64, the row of x that (row, k) went to, -1 where topk_idx is -1
    offsets: Tensor  # [L] int32, the end of each group with its padding: `offs` of grouped_mm


class UnpermuteGrads(NamedTuple):
    """Where unpermute's gradients go."""

    y: Tensor  # [M, D]
    weights: Tensor  # [N, K]


class KnownPairs(Protocol):
    """What a handle of dispatch_by_expert knows besides: the rows of this rank's pairs.

    A pair is one (token, k) with an expert. Here every pair has a row, M with their padding.
    """

    @property
    def num_rows(self) -> int:
        """M, the rows of all pairs, with their padding."""

    @property
    def row_of(self) -> Tensor:
        """[N, K] int64, the pair's row of x, -1 where its expert lives elsewhere."""

    @property
    def topk_weights(self) -> Tensor:
        """[N, K] float32, 0.0 where row_of is -1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ByExpert:
    """`KnownPairs` that the engine has listed."""

    num_rows: int
    row_of: Tensor
    topk_weights: Tensor


class Route(NamedTuple):
    """A layout's rows, listed twice: as they are sent, and as each token finds its copies again.

    Two tokens, three ranks; token 0 goes to ranks 0 and 2, token 1 to rank 2:

        send_token  [0, 0, 1]     rows by (rank, token): rank 0 gets token 0; rank 2 gets 0 and 1
        send_counts [1, 0, 2]
        copy_start  [0, 2, 3]     token 0 has copies 0 and 1, token 1 has copy 2
        copy_rank   [0, 2, 2]     ... which went to these ranks, ascending within a token
        copy_slot   [0, 0, 1]     ... as this row of those sent to that rank
    """

    send_token: Tensor  # [N] int32
    send_counts: tuple[int, ...]  # R
    copy_start: Tensor  # [T + 1] int32
    copy_rank: Tensor  # [N] int32
    copy_slot: Tensor  # [N] int32


class DeviceCounts(NamedTuple):
    """A layout and its route on a device, before the host has read any number of them."""

    layout: Layout
    route: Route  # send_counts is empty, and lists by rows have room for as many as there may be
    # [1 + R + E] int64: the flat place of the first bad index or -1, rows by rank, pairs by expert
    numbers: Tensor

    def settle(self, numbers: np.ndarray) -> Route:
        """The route, once the host has read `numbers`."""
        num_ranks, route = self.layout.num_tokens_per_rank.shape[0], self.route
        counts = tuple(numbers[1 : 1 + num_ranks].tolist())
        num_rows = sum(counts)
        return Route(
            send_token=route.send_token[:num_rows],
            send_counts=counts,
            copy_start=route.copy_start,
            copy_rank=route.copy_rank[:num_rows],
            copy_slot=route.copy_slot[:num_rows],
        )


class Flow(NamedTuple):
    """One dispatch as this rank sees it: which rows it sends, and how many come from whom."""

    route: Route
    recv_counts: tuple[int, ...]  # R, rows from each rank
    num_rows: int  # of recv_x: all that arrive, or num_worst_tokens
    tokens_R: np.ndarray  # int64, the tokens of each rank
    rows_R: np.ndarray | None  # int64, num_rows of each rank; this and the next on one node only
    sent_RR: np.ndarray | None  # int64, rows from rank i to rank j; on several nodes O(R * R)
    most_rows: int = 0  # of any rank's result, at most: a bound that all ranks know
    two_level: Any = None  # the route between nodes, if there are several

    @classmethod
    def of(
        cls,
        route: Route,
        came_R: np.ndarray,
        tokens_R: np.ndarray,
        sent_RR: np.ndarray | None = None,
        two_level: Any = None,
    ) -> Flow:
        """A flow with room for what comes. `sent_RR` on one node, `two_level` on several."""
        counts, most = tuple(came_R.tolist()), int(tokens_R.sum())
        rows_R = None if sent_RR is None else sent_RR.sum(0)
        return cls(route, counts, sum(counts), tokens_R, rows_R, sent_RR, most, two_level)

    @property
    def num_received(self) -> int:
        return sum(self.recv_counts)


class Received(NamedTuple):
    """What dispatch brings to one rank: N rows by (source rank, token)."""

    x: Tensor  # [N, D]
    scales: Tensor | None  # [N, S], contiguous; FP8 only
    topk_idx: Tensor | None  # [N, K] int64, local expert ids, -1 where the expert is elsewhere
    topk_weights: Tensor | None  # [N, K] float32, 0.0 where topk_idx is -1
    num_tokens_per_expert: list[int]  # L, rounded up to expert_alignment


class Origin(NamedTuple):
    """The Buffer that made a handle, and what another must have in common with it to use it."""

    buffer: int  # its number, the same on all ranks
    rank: int
    place: int  # a digest of the processes, nodes, placement and transport of the group
    nodes: tuple[int, ...]  # the node of each rank

    def serves(self, other: Origin) -> bool:
        """Whether handles of this origin can be used by Buffers of the other."""
        return self.rank == other.rank and self.place == other.place

    def number(self, call: int, user: Origin) -> int:
        """How ranks name a handle of this origin's call to each other, in a call on `user`."""
        if self.buffer == user.buffer:
            return call
        return digest(f"{self.buffer} {call}") | OTHER_BUFFER


OTHER_BUFFER = 1 << 62  # from here on numbers are those of handles of another Buffer
