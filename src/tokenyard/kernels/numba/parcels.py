"""Parcels: few rows of several columns, on their way to the ranks of one node.

A parcel holds, for each token of its source, a bit for each rank of the node that gets it, from the
start of a byte; then, from a new cache line, a record for each token that some rank of the node
gets: its row of every column, one after the other. So whoever reads a parcel finds the rows of any
rank of the node in it, and needs no other word but the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.pointers import UINT8, copy_bytes, pointer
from tokenyard.kernels.numba.rows import whole_lines


@njit(nogil=True, cache=True)
def first_record(num_tokens, num_bytes):
    return whole_lines(num_tokens * num_bytes)


@njit(nogil=True, cache=True)
def _fill_parcel_kernel(columns, marks, num_tokens, num_ranks, ranks, parcel):
    each = (ranks.shape[0] + 7) // 8
    goes, bits = pointer(marks, UINT8), pointer(parcel, UINT8)
    at, num_records = parcel + first_record(num_tokens, each), 0
    for t in range(num_tokens):
        row, found = np.int64(t) * num_ranks, np.uint8(0)
        for b in range(each):
            byte = np.uint8(0)
            for i in range(8 * b, min(8 * b + 8, ranks.shape[0])):
                if goes[row + ranks[i]] != 0:
                    byte |= np.uint8(0x80 >> (i - 8 * b))
            bits[t * each + b] = byte
            found |= byte
        if found != 0:
            num_records += 1
            for j in range(columns.shape[0]):
                copy_bytes(at, columns[j, 0] + np.int64(t) * columns[j, 2], columns[j, 1])
                at += columns[j, 1]
    return num_records


def fill_parcel(
    columns: Sequence[Tensor], is_token_in_rank_TR: Tensor, ranks_L: np.ndarray, parcel: int
) -> int:
    """Write a parcel for these ranks, which share a node, to an address. Returns how many records
    it has.
    """
    table = [
        (one.data_ptr(), one.shape[1] * one.element_size(), one.stride(0) * one.element_size())
        for one in columns
    ]
    num_tokens, num_ranks = is_token_in_rank_TR.shape
    marks, values = is_token_in_rank_TR.data_ptr(), np.array(table, np.int64)
    return int(_fill_parcel_kernel(values, marks, num_tokens, num_ranks, ranks_L, parcel))


@njit(nogil=True, cache=True)
def _take_parcels_kernel(parcels, tokens, counts, num_ranks, place, widths, columns):
    """Rows of the rank in this place of its node, to `columns`, the addresses of the results."""
    each, width = (num_ranks + 7) // 8, np.int64(0)
    mask = np.uint8(0x80 >> (place % 8))
    for j in range(widths.shape[0]):
        width += widths[j]
    row = np.int64(0)
    for s in range(parcels.shape[0]):
        bits, end = pointer(parcels[s], UINT8), row + counts[s]
        record = parcels[s] + first_record(tokens[s], each)
        for t in range(tokens[s]):
            found = np.uint8(0)
            for b in range(each):
                found |= bits[t * each + b]
            if bits[t * each + place // 8] & mask != 0:
                if row == end:
                    return s
                at = record
                for j in range(widths.shape[0]):
                    copy_bytes(columns[j] + row * widths[j], at, widths[j])
                    at += widths[j]
                row += 1
            if found != 0:
                record += width
        if row != end:
            return s
    fence_stores()
    return -1


def take_parcels(
    parcels_R: np.ndarray,
    tokens_R: np.ndarray,
    counts_R: np.ndarray,
    num_ranks: int,
    place: int,
    columns: Sequence[Tensor],
) -> int:
    """Take the rows of one rank out of the parcels of all ranks, into contiguous columns, by
    (source rank, token). The rank is in this place among the `num_ranks` of its node.

    `counts` says how many rows come from each rank. Returns the first rank whose parcel has more of
    them, or fewer; -1 if there is none.
    """
    widths = np.array([one.shape[1] * one.element_size() for one in columns], np.int64)
    at = np.array([one.data_ptr() for one in columns], np.int64)
    return int(_take_parcels_kernel(parcels_R, tokens_R, counts_R, num_ranks, place, widths, at))
