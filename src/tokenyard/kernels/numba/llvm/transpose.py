"""Small transposes in registers, as shuffles of vectors that LLVM has for every machine.

A `like` argument is an empty array whose dtype has the size of a unit; addresses and strides are in
bytes, and nothing need be aligned.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, register_jitable

from tokenyard.wire.columns import LINE

_LANE = 16  # bytes within which every machine interleaves two vectors in one instruction

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _size(like: Any) -> Any:
    return like.dtype.bitwidth // 8


def _vector(num_bytes: Any, unit: Any) -> Any:
    return ir.VectorType(ir.IntType(8 * unit), num_bytes // unit)


def _at(builder: Any, address: Any, index: Any, stride: Any, kind: Any) -> Any:
    place = builder.add(address, builder.mul(stride, _I64(index)))
    return builder.inttoptr(place, kind.as_pointer())


def _load_rows(builder: Any, address: Any, stride: Any, count: Any, kind: Any) -> Any:
    return [builder.load(_at(builder, address, i, stride, kind), align=1) for i in range(count)]


def _store_rows(builder: Any, rows: Any, address: Any, stride: Any, streaming: Any = False) -> None:
    for i, row in enumerate(rows):
        align = row.type.count * row.type.element.width // 8 if streaming else 1
        store = builder.store(row, _at(builder, address, i, stride, row.type), align=align)
        if streaming:
            store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))


def _pick(builder: Any, one: Any, other: Any, lanes: Any) -> Any:
    mask = ir.Constant(ir.VectorType(_I32, len(lanes)), lanes)
    return builder.shuffle_vector(one, other, mask)


def _interleave_halves(size: Any, lane: Any) -> Any:
    """Which elements make the first and the second of two interleaved vectors, lane by lane.

    >>> _interleave_halves(8, 4)  # a0 b0 a1 b1 a4 b4 a5 b5 and a2 b2 a3 b3 a6 b6 a7 b7
    ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
    """
    low = [i - i % lane + i % lane // 2 + i % 2 * size for i in range(size)]
    return low, [i + lane // 2 for i in low]


def _swap_blocks(size: Any, block: Any) -> Any:
    """Which elements make the two vectors whose blocks off the diagonal are swapped.

    >>> _swap_blocks(4, 2)  # a0 a1 b0 b1 and a2 a3 b2 b3
    ([0, 1, 4, 5], [2, 3, 6, 7])
    """
    low = [i if not i & block else size + i - block for i in range(size)]
    return low, [i + block for i in low]


def _transpose(builder: Any, rows: Any, unit: Any) -> Any:
    """A square of vectors.

    An element's place is the bits of its row and of its column. Interleaving two rows inside lanes
    swaps a bit of the row for the highest bit of the column inside a lane, and moves the others up;
    all of them, from the highest down, transpose each lane. The lanes then change places whole.
    """
    size, lane = len(rows), _LANE // unit
    steps = [lane >> k for k in range(1, lane.bit_length())]  # half a lane, ... 2, 1
    steps += [lane << k for k in range((size // lane).bit_length() - 1)]
    for step in steps:
        halves = _interleave_halves(size, lane) if step < lane else _swap_blocks(size, step)
        for i in range(size):
            if not i & step:
                pair = rows[i], rows[i + step]
                rows[i], rows[i + step] = (_pick(builder, *pair, half) for half in halves)
    return rows


@register_jitable
def large_side(unit):
    """Bytes on a side of a large square: a line, but 64 rows of bytes are too many registers."""
    return 32 if unit == 1 else LINE


def _make_transpose(side: Any, streaming: Any = False) -> Any:
    @intrinsic
    def transpose(typingctx, target, target_stride, source, source_stride, like):
        """target[j][i] = source[i][j] for a square of units."""
        unit = _size(like)
        sig = types.void(*[types.int64] * 4, like)

        def codegen(context, builder, signature, args):
            target, target_stride, source, source_stride, _ = args
            if unit < _LANE:
                kind = _vector(side(unit), unit)
                rows = _load_rows(builder, source, source_stride, kind.count, kind)
                columns = _transpose(builder, rows, unit)
                _store_rows(builder, columns, target, target_stride, streaming)
            return context.get_dummy_value()

        return sig, codegen

    return transpose


transpose_small = _make_transpose(lambda unit: _LANE)
transpose_large = _make_transpose(large_side)
transpose_streaming = _make_transpose(large_side, streaming=True)  # target: whole lines


def _collect(builder: Any, vectors: Any, places: Any) -> Any:
    """One vector of the elements at (vector, index)."""
    size = vectors[0].type.count
    taken = vectors[0]
    for v in range(1, len(vectors)):
        lanes = [i if vector < v else size + index for i, (vector, index) in enumerate(places)]
        if v == 1:
            lanes = [size * vector + index if vector < 2 else 0 for vector, index in places]
        taken = _pick(builder, taken, vectors[v], lanes)
    return taken


def _make_weave(count: Any) -> Any:
    """`count` vectors to one after the other and back.

    Element i of stream s is element i * count + s of the whole: of the vectors that the whole is
    cut into, number (i * count + s) // size has it.
    """

    def apart(size: Any) -> Any:
        return [[divmod(i * count + s, size) for i in range(size)] for s in range(count)]

    def together(size: Any) -> Any:
        whole = [divmod(e, count)[::-1] for e in range(count * size)]
        return [whole[v * size : (v + 1) * size] for v in range(count)]

    def codegen_of(unit: Any, places_of: Any, source_strided: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target, source, stride, _ = args
            strides = (stride, _I64(LINE)) if source_strided else (_I64(LINE), stride)
            if unit < _LANE:
                kind = _vector(LINE, unit)
                vectors = _load_rows(builder, source, strides[0], count, kind)
                rows = [_collect(builder, vectors, places) for places in places_of(kind.count)]
                _store_rows(builder, rows, target, strides[1])
            return context.get_dummy_value()

        return codegen

    @intrinsic
    def interleave(typingctx, target, source, source_stride, like):
        """Vectors that lie `source_stride` apart, element by element into one stretch of memory."""
        sig = types.void(*[types.int64] * 3, like)
        return sig, codegen_of(_size(like), together, True)

    @intrinsic
    def deinterleave(typingctx, target, source, target_stride, like):
        """One stretch of memory into vectors that lie `target_stride` apart."""
        sig = types.void(*[types.int64] * 3, like)
        return sig, codegen_of(_size(like), apart, False)

    return interleave, deinterleave


(interleave_2, deinterleave_2), (interleave_3, deinterleave_3), (interleave_4, deinterleave_4) = (
    map(_make_weave, (2, 3, 4))
)


@intrinsic
def move(typingctx, target, source, like):
    """Copy one unit."""
    sig = types.void(types.int64, types.int64, like)

    def codegen(context, builder, signature, args):
        pointer = _vector(_size(like), 1).as_pointer()
        target, source = (builder.inttoptr(arg, pointer) for arg in args[:2])
        builder.store(builder.load(source, align=1), target, align=1)
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def copy_line(typingctx, target, source):
    sig = types.void(types.int64, types.int64)

    def codegen(context, builder, signature, args):
        pointer = _vector(LINE, 8).as_pointer()
        target, source = (builder.inttoptr(arg, pointer) for arg in args)
        builder.store(builder.load(source, align=1), target, align=1)
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def stack(typingctx, num_bytes):
    """The address of memory that lives as long as the function that asks."""
    if not isinstance(num_bytes, types.IntegerLiteral):
        return None
    sig = types.int64(types.int64)

    def codegen(context, builder, signature, args):
        room = cgutils.alloca_once(builder, _I64, size=num_bytes.literal_value // 8)
        return builder.ptrtoint(room, _I64)

    return sig, codegen


@intrinsic
def prefetch(typingctx, address):
    """Bring a line into the second cache. An address where there is no memory does no harm."""
    sig = types.void(types.int64)

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        call = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        read, second, data = _I32(0), _I32(2), _I32(1)
        builder.call(call, [builder.inttoptr(args[0], byte), read, second, data])
        return context.get_dummy_value()

    return sig, codegen
