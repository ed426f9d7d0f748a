"""Loops of `compiled` whose vector form is stated, because LLVM's own vectoriser does not find it: int4 codes to numbers, and the
squares of a leaf in float64. Vectors are LLVM's generic ones of 16 or 8 elements, which become NEON's or AVX's instructions.

Each operation is one of IEEE arithmetic without fast-math flags, so the bits are those of the loops that they replace.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

BLOCK: Final = 256
LEAF: Final = 1024
_WIDTH: Final = 16
_X86: Final = platform.machine().lower() in ("x86_64", "amd64")
_INDEX: Final = ir.IntType(64)
_FLOATS: Final = ir.VectorType(ir.FloatType(), _WIDTH)
_BYTES: Final = ir.VectorType(ir.IntType(8), _WIDTH)
_WORDS: Final = ir.VectorType(ir.IntType(32), _WIDTH)
_HALVES: Final = ir.VectorType(ir.IntType(16), _WIDTH)
_EIGHT: Final = ir.VectorType(ir.FloatType(), 8)
_FOUR: Final = ir.VectorType(ir.FloatType(), 4)
_SHORT: Final = ir.VectorType(ir.IntType(8), 8)
_DOUBLES: Final = ir.VectorType(ir.DoubleType(), 8)


def _is_vector(kind: Any) -> bool:
    """A flat array without gaps; an intrinsic that gets another one fails when it is compiled."""
    return isinstance(kind, types.Array) and kind.ndim == 1 and kind.layout == "C"


def _address(context: Any, builder: Any, kind: Any, value: Any, index: Any, vector: Any) -> Any:
    made: Any = arrayobj.make_array
    data = made(kind)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(_lanes(vector), None))


def _lanes(vector: Any) -> Any:
    return ir.VectorType(ir.IntType(32), vector.count)


def _constant(vector: Any, value: int) -> Any:
    return ir.Constant(vector, [value] * vector.count)


@contextlib.contextmanager
def _steps(builder: Any, count: int, width: int = _WIDTH) -> Iterator[Any]:
    """A loop over `count` elements, `width` at a time. Unrolled here it would run no faster and compile for longer."""
    loop: Any = cgutils.for_range
    with loop(builder, ir.Constant(_INDEX, count // width)) as turn:
        yield builder.mul(turn.index, ir.Constant(_INDEX, width))


def _advanced(builder: Any, pointer: Any, count: Any) -> Any:
    """By `count` elements of the vector that it points to."""
    flat = builder.bitcast(pointer, pointer.type.pointee.element.as_pointer())
    moved = builder.gep(flat, [ir.Constant(_INDEX, count) if isinstance(count, int) else count])
    return builder.bitcast(moved, pointer.type)


def _function(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    find: Any = cgutils.get_or_insert_function
    return find(builder.module, ir.FunctionType(result, arguments), name)


def _numbers(builder: Any, packed: Any, factor: Any) -> tuple[Any, Any]:
    """The int4 codes in the low and in the high bits of bytes, in units of a sixteenth of a step, times the factor. All but the
    last multiplication is exact, so that an architecture may have its own way: x86 has one unit that moves numbers between
    lanes, and uses it once; NEON has no conversion from bytes, but moves numbers between lanes as quickly as it adds."""
    if _X86:
        wide = builder.sext(packed, ir.VectorType(ir.IntType(32), packed.type.count))
        low = builder.ashr(builder.shl(wide, _constant(wide.type, 28)), _constant(wide.type, 24))
        both = (low, builder.and_(wide, _constant(wide.type, -16)))
        floats = [builder.sitofp(codes, factor.type) for codes in both]
    else:
        both = (builder.shl(packed, _constant(packed.type, 4)), builder.and_(packed, _constant(packed.type, -16)))
        floats = [_zipped(builder, codes, factor.type) for codes in both]
    return builder.fmul(floats[0], factor), builder.fmul(floats[1], factor)


def _zipped(builder: Any, codes: Any, floats: Any) -> Any:
    """A byte b below the bits of 2^23 is the float 2^23 + b: interleaving takes half the instructions of two extensions and a
    conversion."""
    width = codes.type.count
    order = ir.Constant(ir.VectorType(ir.IntType(32), 2 * width), [j for i in range(width) for j in (i, width + i)])
    halves = ir.VectorType(ir.IntType(16), width)
    raised = builder.xor(codes, _constant(codes.type, -128))
    low = builder.bitcast(builder.shuffle_vector(raised, _constant(codes.type, 0), order), halves)
    bits = builder.shuffle_vector(low, _constant(halves, 0x4B00), order)
    return builder.fsub(builder.bitcast(bits, floats), ir.Constant(floats, [2.0**23 + 128.0] * width))


def _nibble_block(*, drifts: bool, sums: bool, shared: bool) -> Any:
    """A loop over a whole int4 block, into out[first:first + 256] from codes[at:at + 128]. Byte j has element j in its low bits
    and element j + 128 in its high ones. `drifts`: drift[moved:moved + 256] is added; `shared`: then it is multiplied by the
    share; `sums`: and added to what is there. Every result is rounded."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places = [context.cast(builder, arguments[i], signature.args[i], types.intp) for i in (1, 4, 7)]
        source = _address(context, builder, signature.args[0], arguments[0], places[0], _BYTES)
        moved = _address(context, builder, signature.args[3], arguments[3], places[1], _FLOATS)
        target = _address(context, builder, signature.args[6], arguments[6], places[2], _FLOATS)
        factor, share = _splat(builder, arguments[2], _FLOATS), _splat(builder, arguments[5], _FLOATS)

        def put(x: Any, element: Any) -> None:
            at = _advanced(builder, target, element)
            if drifts:
                x = builder.fadd(x, builder.load(_advanced(builder, moved, element), align=4))
            if shared:
                x = builder.fmul(x, share)
            if sums:
                x = builder.fadd(builder.load(at, align=4), x)
            builder.store(x, at, align=4)

        with _steps(builder, BLOCK // 2) as step:
            packed = builder.load(_advanced(builder, source, step), align=1)
            low, high = _numbers(builder, packed, factor)
            put(low, step)
            put(high, builder.add(step, ir.Constant(_INDEX, BLOCK // 2)))
        return context.get_dummy_value()

    def nibbles(
        typingctx: Any, codes: Any, at: Any, factor: Any, drift: Any, moved: Any, share: Any, out: Any, first: Any
    ) -> Any:
        assert all(_is_vector(kind) for kind in (codes, drift, out)), "these arrays have gaps"
        return types.void(codes, at, types.float32, drift, moved, types.float32, out, first), build

    return intrinsic(nibbles)


nibbles = _nibble_block(drifts=False, sums=False, shared=False)
moved_nibbles = _nibble_block(drifts=True, sums=False, shared=False)
share_of_nibbles = _nibble_block(drifts=False, sums=False, shared=True)
share_of_moved_nibbles = _nibble_block(drifts=True, sums=False, shared=True)
add_nibbles = _nibble_block(drifts=False, sums=True, shared=True)
add_moved_nibbles = _nibble_block(drifts=True, sums=True, shared=True)


@intrinsic
def nibble_squares(typingctx: Any, codes: Any, at: Any) -> Any:
    """The sum of the squares of the 256 int4 codes in codes[at:at + 128]: below 2^15, so sixteen bits hold it."""
    assert _is_vector(codes), "this array has gaps"

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.cast(builder, arguments[1], signature.args[1], types.intp)
        source, four = _address(context, builder, signature.args[0], arguments[0], start, _BYTES), _constant(_BYTES, 4)
        sums = _constant(_HALVES, 0)
        for step in range(0, BLOCK // 2, _WIDTH):
            packed = builder.load(_advanced(builder, source, step), align=1)
            low, high = builder.ashr(builder.shl(packed, four), four), builder.ashr(packed, four)
            both = builder.add(builder.mul(low, low), builder.mul(high, high))  # at most 128: unsigned bytes hold it
            sums = builder.add(sums, builder.zext(both, _HALVES))
        while sums.type.count > 1:
            half = sums.type.count // 2
            parts = [ir.Constant(ir.VectorType(ir.IntType(32), half), list(range(k, k + half))) for k in (0, half)]
            sums = builder.add(*(builder.shuffle_vector(sums, sums, part) for part in parts))
        return builder.zext(builder.extract_element(sums, ir.Constant(ir.IntType(32), 0)), ir.IntType(32))

    return types.int32(codes, at), build


@intrinsic
def difference_block(typingctx: Any, new: Any, old: Any, first: Any, out: Any) -> Any:
    """out[:256] = new - old from `first` on; returns the largest magnitude's bits. Magnitudes order as their bits do."""
    assert all(_is_vector(kind) for kind in (new, old, out)), "these arrays have gaps"

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.cast(builder, arguments[2], signature.args[2], types.intp)
        zero = ir.Constant(_INDEX, 0)
        one, other = (_address(context, builder, signature.args[i], arguments[i], start, _FLOATS) for i in (0, 1))
        target = _address(context, builder, signature.args[3], arguments[3], zero, _FLOATS)
        largest = _constant(_WORDS, 0)
        for step in range(0, BLOCK, _WIDTH):
            a, b = (builder.load(_advanced(builder, pointer, step), align=4) for pointer in (one, other))
            x = builder.fsub(a, b)
            builder.store(x, _advanced(builder, target, step), align=4)
            magnitude = builder.and_(builder.bitcast(x, _WORDS), _constant(_WORDS, 0x7FFFFFFF))
            largest = builder.select(builder.icmp_unsigned(">", magnitude, largest), magnitude, largest)
        reduced = _function(builder, "llvm.vector.reduce.umax.v16i32", ir.IntType(32), [_WORDS])
        return builder.call(reduced, (largest,))

    return types.int32(new, old, first, out), build


@intrinsic
def int8_block(
    typingctx: Any, x: Any, inverse: Any, magic: Any, quarter: Any, codes: Any, old: Any, new: Any, first: Any
) -> Any:
    """Codes of x[:256], and new = old + code * scale, from `first` on. x * inverse + magic has four times the code in its lowest
    bits, so that minus magic it is four times the code as a float: exact, and `quarter` is a fourth of the scale."""
    assert all(_is_vector(kind) for kind in (x, codes, old, new)), "these arrays have gaps"

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.cast(builder, arguments[7], signature.args[7], types.intp)
        source = _address(context, builder, signature.args[0], arguments[0], ir.Constant(_INDEX, 0), _FLOATS)
        written = _address(context, builder, signature.args[4], arguments[4], start, _BYTES)
        before, after = (_address(context, builder, signature.args[i], arguments[i], start, _FLOATS) for i in (5, 6))
        factor, offset, scale = (_splat(builder, arguments[i], _FLOATS) for i in (1, 2, 3))
        with _steps(builder, BLOCK) as step:
            grid = builder.fadd(builder.fmul(builder.load(_advanced(builder, source, step), align=4), factor), offset)
            code = builder.trunc(builder.bitcast(grid, _WORDS), _BYTES)
            builder.store(code, _advanced(builder, written, step), align=1)
            value = builder.fmul(builder.fsub(grid, offset), scale)
            total = builder.fadd(builder.load(_advanced(builder, before, step), align=4), value)
            builder.store(total, _advanced(builder, after, step), align=4)
        return context.get_dummy_value()

    number = types.float32
    return types.void(x, number, number, number, codes, old, new, first), build


def _sum_of_eighth(builder: Any, sums: Any) -> Any:
    """Of 128 float64 numbers, over the tree."""
    parts = [builder.load(_advanced(builder, sums, element), align=8) for element in range(0, LEAF // 8, 8)]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [builder.fadd(a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
    total = [builder.extract_element(parts[0], ir.Constant(ir.IntType(32), i)) for i in range(8)]
    while len(total) > 1:
        half = len(total) // 2
        total = [builder.fadd(a, b) for a, b in zip(total[:half], total[half:], strict=True)]
    return total[0]


def _leaf_of_nibbles(*, drifts: bool) -> Any:
    """The sum of squares, as `leaf_squares`, of the four int4 blocks in codes[at:at + 512] with the factors from `block` on.
    `drifts`: drift[first:first + 1024] is added. The numbers go to no memory on the way."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, first, place = (context.cast(builder, arguments[i], signature.args[i], types.intp) for i in (1, 3, 5))
        source = _address(context, builder, signature.args[0], arguments[0], start, _SHORT)
        scales = _address(context, builder, signature.args[2], arguments[2], first, _FOUR)
        moved = _address(context, builder, signature.args[4], arguments[4], place, _EIGHT)
        given = builder.load(scales, align=4)
        factors = [_splat(builder, builder.extract_element(given, ir.Constant(ir.IntType(32), i)), _EIGHT) for i in range(4)]
        fused = _function(builder, "llvm.fma.v8f64", _DOUBLES, [_DOUBLES] * 3)
        allocate: Any = cgutils.alloca_once
        sums = builder.bitcast(allocate(builder, ir.ArrayType(_DOUBLES, 16)), _DOUBLES.as_pointer())

        def element(block: int, step: Any) -> list[Any]:
            """Of element `step` of each half of a block, and its neighbours."""
            at = builder.add(step, ir.Constant(_INDEX, block * BLOCK // 2))
            found = _numbers(builder, builder.load(_advanced(builder, source, at), align=1), factors[block])
            if drifts:
                places = (builder.add(step, ir.Constant(_INDEX, (2 * block + half) * BLOCK // 2)) for half in (0, 1))
                parts = [builder.load(_advanced(builder, moved, place), align=4) for place in places]
                found = builder.fadd(found[0], parts[0]), builder.fadd(found[1], parts[1])
            return [builder.fpext(x, _DOUBLES) for x in found]

        def pairs(block: int, step: Any) -> list[Any]:
            """An exact square and another: their fused sum rounds as a sum does."""
            couples = zip(element(block, step), element(block + 2, step), strict=True)
            return [builder.call(fused, (other, other, builder.fmul(one, one))) for one, other in couples]

        with _steps(builder, BLOCK // 2, 8) as step:
            low, high = (builder.fadd(one, other) for one, other in zip(pairs(0, step), pairs(1, step), strict=True))
            builder.store(builder.fadd(low, high), _advanced(builder, sums, step), align=8)
        return _sum_of_eighth(builder, sums)

    def leaf(typingctx: Any, codes: Any, at: Any, factors: Any, block: Any, drift: Any, first: Any) -> Any:
        assert all(_is_vector(kind) for kind in (codes, factors, drift)), "these arrays have gaps"
        return types.float64(codes, at, factors, block, drift, first), build

    return intrinsic(leaf)


leaf_of_nibbles = _leaf_of_nibbles(drifts=False)
leaf_of_moved_nibbles = _leaf_of_nibbles(drifts=True)


@intrinsic
def leaf_squares(typingctx: Any, x: Any, first: Any) -> Any:
    """The sum of squares of x[first:first + 1024] over the tree of `tensors.norms`. The square of a float is exact in float64."""
    assert _is_vector(x), "this array has gaps"

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.cast(builder, arguments[1], signature.args[1], types.intp)
        at = _address(context, builder, signature.args[0], arguments[0], start, _EIGHT)
        fused = _function(builder, "llvm.fma.v8f64", _DOUBLES, [_DOUBLES] * 3)

        def wide(element: Any) -> Any:
            return builder.fpext(builder.load(_advanced(builder, at, element), align=4), _DOUBLES)

        def level(element: Any, half: int) -> Any:
            """Of the elements that the tree's upper levels add to this one."""
            upper = builder.add(element, ir.Constant(_INDEX, half))
            if half == LEAF // 2:  # exact squares: a fused sum of two rounds as a sum does
                one, other = wide(element), wide(upper)
                return builder.call(fused, (other, other, builder.fmul(one, one)))
            return builder.fadd(level(element, 2 * half), level(upper, 2 * half))

        allocate: Any = cgutils.alloca_once
        sums = builder.bitcast(allocate(builder, ir.ArrayType(_DOUBLES, 16)), _DOUBLES.as_pointer())
        with _steps(builder, LEAF // 8, 8) as step:
            builder.store(level(step, LEAF // 8), _advanced(builder, sums, step), align=8)
        return _sum_of_eighth(builder, sums)

    return types.float64(x, first), build


