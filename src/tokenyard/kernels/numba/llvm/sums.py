"""Sums of rows in a wider type: element by element, by whole vectors in registers, and scaled.

A product is rounded before it is added: LLVM fuses the two only where it is told that it may, and
here it is not.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm import vectors
from tokenyard.kernels.numba.llvm.vectors import LANES
from tokenyard.wire.columns import LINE

WIDE_LANES = 8 * LANES  # eight vectors of sums fit the registers, and 128 elements are whole lines


def _make(num_vectors: Any, lanes: Any, streaming: Any = False, scaled: Any = True) -> Any:
    @intrinsic
    def scaled_sum(typingctx, out, sources, factors, count, at, like):
        """out[at:] = narrow(0 + factors[0] * sources[0][at:] + factors[1] * sources[1][at:] ...)

        For num_vectors * lanes elements. `sources` points to `count` addresses of rows, `factors`
        to as many wide floats, which a sum that is not scaled does not read; `out` is the address
        of a row, `at` counts elements. If streaming, out + at must be on a line's boundary.
        """
        dtype = like.dtype
        sig = types.void(*[types.int64] * 5, like)

        def codegen(context, builder, signature, args):
            out, sources, factors, count, at, _ = args
            narrow, wide = vectors.element(dtype), vectors.element(vectors.wide(dtype))
            sums = [
                cgutils.alloca_once_value(builder, vectors.splat(wide, 0.0, lanes))
                for _ in range(num_vectors)
            ]
            addresses = builder.inttoptr(sources, at.type.as_pointer())
            weights = builder.inttoptr(factors, wide.as_pointer())
            with cgutils.for_range(builder, count) as loop:
                row = builder.load(builder.gep(addresses, [loop.index]))
                row = builder.inttoptr(row, narrow.as_pointer())
                terms = _read(builder, row, at, dtype, num_vectors, lanes)
                if scaled:
                    weight = builder.load(builder.gep(weights, [loop.index]))
                    weight = _broadcast(builder, weight, lanes)
                    terms = [builder.fmul(weight, value) for value in terms]
                for total, term in zip(sums, terms):
                    builder.store(builder.fadd(builder.load(total), term), total)
            pointer = builder.inttoptr(out, narrow.as_pointer())
            _write(builder, sums, pointer, at, dtype, lanes, streaming)
            return context.get_dummy_value()

        return sig, codegen

    return scaled_sum


def _read(builder: Any, row: Any, at: Any, dtype: Any, num_vectors: Any, lanes: Any) -> list[Any]:
    """num_vectors * lanes elements of a row from `at` on, wide; `_write` undoes their order."""
    if num_vectors == 1:
        value = vectors.load(builder, row, at, vectors.element(dtype), lanes)
        return [vectors.widen(builder, value, dtype, lanes)]
    found = []
    for i in range(0, num_vectors, 2):
        place = builder.add(at, at.type(i * lanes))
        found += vectors.widen_pair(builder, row, place, dtype, lanes)
    return found


def _write(
    builder: Any, sums: Any, pointer: Any, at: Any, dtype: Any, lanes: Any, streaming: Any
) -> None:
    """Round sums of what `_read` gave, and store them at pointer[at], which is on a line's boundary
    if they are streamed.
    """
    values = [builder.load(total) for total in sums]
    if len(values) == 1:
        narrow = {0: vectors.narrow(builder, values[0], dtype, lanes)}
    else:
        narrow = {}
        for i in range(0, len(values), 2):
            pair = vectors.narrow_pair(builder, values[i : i + 2], dtype, lanes)
            narrow |= {i * lanes + more: value for more, value in pair.items()}
    for more, value in narrow.items():
        _put(builder, value, pointer, builder.add(at, at.type(more)), dtype, lanes, streaming)


def _put(
    builder: Any, value: Any, pointer: Any, index: Any, dtype: Any, lanes: Any, streaming: Any
) -> None:
    """Store elements at pointer[index], which `lanes` of them divide if they are streamed."""
    place = builder.bitcast(builder.gep(pointer, [index]), value.type.as_pointer())
    if streaming:
        store = builder.store(value, place, align=min(LINE, lanes * dtype.bitwidth // 8))
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
    else:
        builder.store(value, place, align=1)


def _broadcast(builder: Any, value: Any, lanes: Any) -> Any:
    if lanes == 1:
        return value
    vector = vectors.vector(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), lanes), None))


_sum_wide = _make(WIDE_LANES // LANES, LANES)
_sum_wide_streaming = _make(WIDE_LANES // LANES, LANES, streaming=True)
_sum_lanes = _make(1, LANES)
_sum_one = _make(1, 1)
_add_wide = _make(WIDE_LANES // LANES, LANES, scaled=False)
_add_wide_streaming = _make(WIDE_LANES // LANES, LANES, streaming=True, scaled=False)
_add_lanes = _make(1, LANES, scaled=False)
_add_one = _make(1, 1, scaled=False)


@njit(nogil=True, cache=True)
def sum_scaled(out, sources, factors, count, hidden, streaming, like):
    """out[:] = the sum of `count` rows times their factors, at the addresses `sources`."""
    wide = hidden - hidden % WIDE_LANES
    whole = hidden - hidden % LANES
    if streaming:
        for d in range(0, wide, WIDE_LANES):
            _sum_wide_streaming(out, sources, factors, count, d, like)
    else:
        for d in range(0, wide, WIDE_LANES):
            _sum_wide(out, sources, factors, count, d, like)
    for d in range(wide, whole, LANES):
        _sum_lanes(out, sources, factors, count, d, like)
    for d in range(whole, hidden):
        _sum_one(out, sources, factors, count, d, like)


@njit(nogil=True, cache=True)
def sum_plain(out, sources, count, hidden, streaming, like):
    """out[:] = the sum of `count` rows, at the addresses `sources`."""
    wide = hidden - hidden % WIDE_LANES
    whole = hidden - hidden % LANES
    if streaming:
        for d in range(0, wide, WIDE_LANES):
            _add_wide_streaming(out, sources, 0, count, d, like)
    else:
        for d in range(0, wide, WIDE_LANES):
            _add_wide(out, sources, 0, count, d, like)
    for d in range(wide, whole, LANES):
        _add_lanes(out, sources, 0, count, d, like)
    for d in range(whole, hidden):
        _add_one(out, sources, 0, count, d, like)


def _make_grouped(num_vectors: Any, lanes: Any, streaming: Any = False) -> Any:
    @intrinsic
    def grouped_sum(typingctx, out, sources, factors, ends, num_groups, at, like):
        """out[at:] = narrow(0 + narrow(the sum of group 0) + narrow(that of group 1) ...)

        For num_vectors * lanes elements. A group's sum is that of `scaled_sum`. `ends` points to
        the end of each group among `sources` and `factors`.
        """
        dtype = like.dtype
        sig = types.void(*[types.int64] * 6, like)

        def codegen(context, builder, signature, args):
            out, sources, factors, ends, num_groups, at, _ = args
            narrow, wide = vectors.element(dtype), vectors.element(vectors.wide(dtype))
            zero = vectors.splat(wide, 0.0, lanes)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(num_vectors)]
            first = cgutils.alloca_once_value(builder, at.type(0))
            addresses, limits = (
                builder.inttoptr(one, at.type.as_pointer()) for one in (sources, ends)
            )
            weights = builder.inttoptr(factors, wide.as_pointer())
            with cgutils.for_range(builder, num_groups) as group:
                # Memory of the whole function, into which each group stores zeros anew.
                parts = [cgutils.alloca_once_value(builder, zero) for _ in range(num_vectors)]
                end = builder.load(builder.gep(limits, [group.index]))
                with cgutils.for_range(builder, end, start=builder.load(first)) as loop:
                    row = builder.load(builder.gep(addresses, [loop.index]))
                    row = builder.inttoptr(row, narrow.as_pointer())
                    weight = builder.load(builder.gep(weights, [loop.index]))
                    weight = _broadcast(builder, weight, lanes)
                    values = _read(builder, row, at, dtype, num_vectors, lanes)
                    for part, value in zip(parts, values):
                        term = builder.fmul(weight, value)
                        builder.store(builder.fadd(builder.load(part), term), part)
                builder.store(end, first)
                for part, total in zip(parts, sums):
                    # Rounded as it would be if another rank had made the sum of this group.
                    share = vectors.narrow(builder, builder.load(part), dtype, lanes)
                    share = vectors.widen(builder, share, dtype, lanes)
                    builder.store(builder.fadd(builder.load(total), share), total)
            pointer = builder.inttoptr(out, narrow.as_pointer())
            _write(builder, sums, pointer, at, dtype, lanes, streaming)
            return context.get_dummy_value()

        return sig, codegen

    return grouped_sum


_groups_wide = _make_grouped(WIDE_LANES // LANES, LANES)
_groups_wide_streaming = _make_grouped(WIDE_LANES // LANES, LANES, streaming=True)
_groups_one = _make_grouped(1, 1)


@njit(nogil=True, cache=True)
def sum_groups(out, sources, factors, ends, num_groups, hidden, streaming, like):
    """out[:] = the sum of each group's sum of scaled rows, rounded, at the addresses `sources`."""
    wide = hidden - hidden % WIDE_LANES
    if streaming:
        for d in range(0, wide, WIDE_LANES):
            _groups_wide_streaming(out, sources, factors, ends, num_groups, d, like)
    else:
        for d in range(0, wide, WIDE_LANES):
            _groups_wide(out, sources, factors, ends, num_groups, d, like)
    for d in range(wide, hidden):
        _groups_one(out, sources, factors, ends, num_groups, d, like)


def _add_to(builder: Any, total: Any, index: Any, term: Any, wide: Any, lanes: Any) -> None:
    """total[index:] += term"""
    term = builder.fadd(vectors.load(builder, total, index, wide, lanes), term)
    vectors.store(builder, term, total, index, wide, lanes)


def _make_steps(lanes: Any) -> Any:
    """The three steps of a sum, for `lanes` neighbouring elements at once."""

    @intrinsic
    def add(typingctx, total, rows, index, at):
        """total[index:] += wide(rows[at:])"""
        dtype = rows.dtype
        sig = types.void(types.CPointer(vectors.wide(dtype)), rows, types.int64, types.int64)

        def codegen(context, builder, signature, args):
            total, rows, index, at = args
            wide = vectors.element(vectors.wide(dtype))
            term = vectors.widen(
                builder,
                vectors.load(builder, rows, at, vectors.element(dtype), lanes),
                dtype,
                lanes,
            )
            _add_to(builder, total, index, term, wide, lanes)
            return context.get_dummy_value()

        return sig, codegen

    @intrinsic
    def fold(typingctx, total, partial, index, like):
        """total[index:] += wide(narrow(partial[index:])): a node's partial sum, rounded"""
        dtype = like.dtype
        sum_type = types.CPointer(vectors.wide(dtype))
        sig = types.void(sum_type, sum_type, types.int64, like)

        def codegen(context, builder, signature, args):
            total, partial, index, _ = args
            wide = vectors.element(vectors.wide(dtype))
            term = vectors.narrow(
                builder, vectors.load(builder, partial, index, wide, lanes), dtype, lanes
            )
            term = vectors.widen(builder, term, dtype, lanes)
            _add_to(builder, total, index, term, wide, lanes)
            return context.get_dummy_value()

        return sig, codegen

    @intrinsic
    def put(typingctx, out, at, total, index):
        """out[at:] = narrow(total[index:])"""
        dtype = out.dtype
        sig = types.void(out, types.int64, types.CPointer(vectors.wide(dtype)), types.int64)

        def codegen(context, builder, signature, args):
            out, at, total, index = args
            wide = vectors.element(vectors.wide(dtype))
            value = vectors.narrow(
                builder, vectors.load(builder, total, index, wide, lanes), dtype, lanes
            )
            vectors.store(builder, value, out, at, vectors.element(dtype), lanes)
            return context.get_dummy_value()

        return sig, codegen

    return add, fold, put


add_lanes, fold_lanes, put_lanes = _make_steps(LANES)


add_one, fold_one, put_one = _make_steps(1)
