"""Stacks of experts that the ranks of a node share: each process has those of all, side by side, as
one tensor without gaps, and so is each rank's part of it.

A page lies in a segment of the rank that has its first byte. Every process of the node maps the
segments of all ranks into one range of addresses, and may write to the pages of its own part: the
first and the last may hold experts of its neighbours too. A segment lives as long as some process
maps it, so the others still read what a rank has left that died.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard.errors import SharedMemoryError
from tokenyard.shm import segment
from tokenyard.shm.processes import own_address, within
from tokenyard.shm.segment import Segment
from tokenyard.types import round_up

TOLD = 4  # int64s that a rank tells of its stack
_ANSWERS = 10.0  # seconds in which a rank must give a descriptor, where it is asked for one


class Stack(NamedTuple):
    """What `Buffer.share_stack` returns. Each tensor keeps its memory."""

    own: Tensor  # [L, ...] this rank's, which it may write to
    node: Tensor  # [E, ...] of all ranks of the node, ranks ascending: only to be read


class Making:
    """A stack on its way into shared memory: `take`, tell the others, `map`, and `close` when all
    have done so. Raises SharedMemoryError.
    """

    stack: Stack  # in the end

    def __init__(self, own: Tensor, lengths: dict[int, int], rank: int) -> None:
        """`lengths` says how many experts each rank of the node has."""
        self._own, self._rank = own, rank
        num_bytes = math.prod(own.shape[1:]) * own.element_size()
        ends = [num_bytes * end for end in accumulate(lengths.values(), initial=0)]
        self._parts = dict(zip(lengths, pairwise(ends)))  # by rank, the bytes of its experts
        self._num_bytes, self._num_experts = ends[-1], sum(lengths.values())
        self._segment: Segment | None = None

    def take(self) -> Sequence[int]:
        """Take memory for the pages of this rank: the words by which others map it."""
        if why := segment.why_not():
            raise SharedMemoryError(why)
        begin, end = self._pages(self._rank)
        if begin == end:
            return ()
        self._segment = Segment(end - begin)
        return own_address(), *self._segment.told

    def map(self, told: Sequence[Sequence[int]]) -> Sequence[int]:
        """Map the segments of the node's ranks, of which all have told, and copy the stack to its
        part. Nothing is to be told.
        """
        begin, end = self._parts[self._rank]
        memory = part = np.empty(0, np.uint8)
        if num_bytes := self._num_bytes:
            huge = segment.huge_page()
            try:
                step = huge if 0 < huge <= num_bytes else mmap.PAGESIZE
                place = segment.find_place(num_bytes, step)
                memory, part = segment.keep_apart(place, num_bytes, begin, end)
                for rank in self._parts:
                    self._map_part(place, rank, told[rank])
                if begin < end:
                    segment.allow_writing(place + begin, end - begin)
            except OSError as error:
                raise segment.cannot(num_bytes, error) from error
        with torch.inference_mode(self._own.is_inference()):  # what is made so cannot be trained
            # Of its own storage, the whole of which torch.save writes.
            own = self._view(part, len(self._own)).copy_(self._own)
            self.stack = Stack(own, self._view(memory, self._num_experts))
        return ()

    def _pages(self, rank: int) -> tuple[int, int]:
        begin, end = self._parts[rank]
        return round_up(begin, mmap.PAGESIZE), round_up(end, mmap.PAGESIZE)

    def _map_part(self, place: int, rank: int, told: Sequence[int]) -> None:
        process, fd, _, identity = told
        begin, end = self._pages(rank)
        if begin == end:
            return
        try:
            if rank == self._rank:
                assert self._segment is not None
                segment.map_at(place + begin, self._segment.fd, end - begin)
            else:
                wait = within(_ANSWERS)
                segment.attach(process, fd, end - begin, identity, wait, place + begin)
        except (OSError, SharedMemoryError) as error:
            what = f"it cannot map the stack of rank {rank}: {error}"
            raise SharedMemoryError(what) from error

    def close(self) -> None:
        """Nobody maps this rank's segment any more. Existing mappings keep its memory."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _view(self, memory: np.ndarray, length: int) -> Tensor:
        kind, shape = self._own.dtype, (length, *self._own.shape[1:])
        if not memory.size:
            return torch.empty(shape, dtype=kind, device="cpu")
        return torch.from_numpy(memory).view(kind).view(shape)
