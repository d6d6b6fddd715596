"""The sums of combine and of unpermute: each element by one thread, in the order of `spec`.

No tree, no fused multiply-add: terms are added one after the other to a wide number, which is
rounded once. A program has one token and a block of its columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.base import NodeOfRank, Tensors
from tokenyard.kernels.triton.floats import FLOAT64, as_element, as_passed, kind_of, narrow, widen
from tokenyard.kernels.triton.launch import blocks, launch, numbers, power_of_two
from tokenyard.types import Route

_BYTES = 4096  # of a row that a program takes
_PAIRS = 256


def column_block(hidden: int, itemsize: int) -> int:
    """Elements of a row that a program takes."""
    return min(_BYTES // itemsize, power_of_two(hidden))


@triton.jit
def _reduce_kernel(
    tables,
    copy_start,
    copy_rank,
    copy_slot,
    bias_0,
    bias_1,
    out,
    hidden,
    num_ranks,
    num_nodes,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    NUM_BIASES: tl.constexpr,
    SEVERAL_NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`tables` has the address of each rank's rows, then its node.

    On one node copies are added to the biases. On several, each node's are added up and rounded
    first; a node that sent none adds a zero.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    zeros = tl.zeros([BLOCK], tl.float64 if KIND == FLOAT64 else tl.float32)
    total = zeros
    if NUM_BIASES > 0:
        total = total + widen(tl.load(bias_0 + token * hidden + columns, mask=inside), KIND)
    if NUM_BIASES > 1:
        total = total + widen(tl.load(bias_1 + token * hidden + columns, mask=inside), KIND)
    begin, end = tl.load(copy_start + token), tl.load(copy_start + token + 1)
    for node in range(num_nodes):
        partial = zeros if SEVERAL_NODES else total
        for copy in range(begin, end):
            rank = tl.load(copy_rank + copy)
            if tl.load(tables + num_ranks + rank) == node:
                rows = tl.load(tables + rank).to(tl.pointer_type(ELEMENT))
                slot = tl.load(copy_slot + copy).to(tl.int64)
                row = tl.multiple_of(rows, ALIGNED) + slot * hidden
                partial = partial + widen(tl.load(row + columns, mask=inside), KIND)
        if SEVERAL_NODES:
            # Rounded as it would be if a relay of that node had made the sum.
            total = total + widen(narrow(partial, KIND), KIND)
        else:
            total = partial
    tl.store(out + token * hidden + columns, narrow(total, KIND), mask=inside)


def reduce(
    rows_ND: Tensor, route: Route, node_of_rank: NodeOfRank, biases_TD: Tensors, out_TD: Tensor
) -> Tensor:
    first, row_bytes = rows_ND.data_ptr(), rows_ND.shape[1] * rows_ND.element_size()
    firsts = accumulate(route.send_counts[:-1], initial=0)
    addresses = [first + number * row_bytes for number in firsts]
    reduce_at(addresses, route, node_of_rank, biases_TD, out_TD)
    return out_TD


def reduce_at(
    addresses: Sequence[int],
    route: Route,
    node_of_rank: NodeOfRank,
    biases_TD: Tensors,
    out_TD: Tensor,
) -> None:
    """`reduce` of contiguous rows that begin at these addresses, in this rank's memory or not."""
    num_tokens, hidden = out_TD.shape
    kind, itemsize = kind_of(out_TD.dtype), out_TD.element_size()
    block = column_block(hidden, itemsize)
    out = as_passed(out_TD)
    biases = [as_passed(bias.contiguous()) for bias in biases_TD]
    launch(
        _reduce_kernel,
        (num_tokens, blocks(hidden, block)),
        numbers([*addresses, *node_of_rank], out_TD.device),
        route.copy_start,
        route.copy_rank,
        route.copy_slot,
        *[*biases, out, out][:2],  # any tensor stands in for a bias that is not there
        out,
        hidden,
        len(addresses),
        max(node_of_rank) + 1,
        KIND=kind,
        ELEMENT=as_element(kind),
        ALIGNED=math.gcd(16, *addresses),
        NUM_BIASES=len(biases),
        SEVERAL_NODES=max(node_of_rank) > 0,
        BLOCK=block,
    )
