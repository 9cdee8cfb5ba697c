"""The four and eight bits of E2M1 and E4M3 as float32, exactly, sixteen bytes at a time.

Through half precision, whose conversion is one instruction and knows no flushing of subnormals:
  E4M3 s.eeee.mmm   are the upper bits of a half that is 2⁸ too small;
  E2M1 s.ee.m       are the upper bits of a half that is 2¹⁴ too small.
Where the processor looks up a register of bytes in one instruction, E2M1 takes the upper bytes of
its float32, 2¹⁴ too small as well, from two tables: two thirds of the instructions.
The caller's scale makes up for the power of two.
Neighbours: `lanes` has the vectors, `kv_codes` decodes rows with these.
"""

# mypy: ignore-errors

from __future__ import annotations

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from moe_kernels.cpu.lanes import (
    _F32,
    _HALF,
    _I8,
    _I16,
    _I32,
    _I64,
    _LANES,
    WIDTH,
    _call,
    _load,
    _pointer,
    _same,
    _slice,
    _splat,
    lanes,
)


@intrinsic
def load_e4m3(typing_context, memory, offset):
    """Eight E4M3, each 2⁻⁸ of its value; NaN is NaN."""

    def generate(context, builder, signature, arguments):
        stored = _load(context, builder, signature, arguments, _I8)
        wide = builder.zext(stored, ir.VectorType(_I16, WIDTH))
        sign = builder.shl(builder.and_(wide, _same(_I16, 0x80)), _same(_I16, 8))
        rest = builder.and_(wide, _same(_I16, 0x7F))
        bits = builder.or_(sign, builder.shl(rest, _same(_I16, 7)))
        is_nan = builder.icmp_unsigned("==", rest, _same(_I16, 0x7F))
        bits = builder.select(is_nan, _same(_I16, 0x7E00), bits)
        return builder.fpext(builder.bitcast(bits, ir.VectorType(_HALF, WIDTH)), _LANES)

    return lanes(memory, types.int64), generate


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32) * np.float32(2.0**-14)
_E2M1_BYTES = [
    [int(byte) for byte in np.tile(np.concatenate((_E2M1, -_E2M1)).view(np.uint8)[place::4], 2)]
    for place in (2, 3)
]
"""Of every code the third and the fourth byte of its float32, times 2⁻¹⁴; for both halves of a
register."""
HAS_BYTE_TABLE = bool(llvmlite.binding.get_host_cpu_features().get("avx2"))


def _store_halves(builder, halves, factor, target, at):
    """Eight halves times a splat, as float32."""
    value = builder.fmul(builder.fpext(halves, _LANES), factor)
    builder.store(value, builder.gep(target, [_I64(at)]), align=1)


@intrinsic
def store_e4m3(typing_context, memory, offset, target, target_offset, step):
    """Sixteen E4M3 times 2⁻⁸ · `step`, as float32 at `target`; NaN is NaN."""

    def generate(context, builder, signature, arguments):
        _, _, target, target_offset, step = arguments
        count = 2 * WIDTH

        def same(value):
            return _same(_I16, value, count)

        stored = _load(context, builder, signature, arguments, _I8, count)
        wide = builder.shl(builder.zext(stored, ir.VectorType(_I16, count)), same(8))
        # Exponent and mantissa move by one place, the sign stays.
        bits = builder.and_(builder.ashr(wide, same(1)), same(0xBFFF - 0x10000))
        is_nan = builder.icmp_unsigned("==", builder.and_(wide, same(0x7F00)), same(0x7F00))
        bits = builder.or_(bits, builder.sext(is_nan, bits.type))
        halves = builder.bitcast(bits, ir.VectorType(_HALF, count))
        pointer = _pointer(context, builder, signature.args[2], target, target_offset, _LANES)
        factor = _splat(builder, step)
        for part in range(2):
            piece = _slice(builder, halves, part * WIDTH, WIDTH)
            _store_halves(builder, piece, factor, pointer, part)
        return context.get_dummy_value()

    return types.void(memory, types.int64, target, types.int64, types.float32), generate


@intrinsic
def load_e2m1(typing_context, memory, offset, first, second):
    """Of sixteen bytes, low nibble first, sixteen E2M1 times 2⁻¹⁴ · `first`, then sixteen times
    2⁻¹⁴ · `second`: four times eight float32."""

    def generate(context, builder, signature, arguments):
        *place, first, second = arguments
        stored = _load(context, builder, signature, place, _I8, 2 * WIDTH)
        decode = _e2m1_by_table if HAS_BYTE_TABLE else _e2m1_by_halves
        factors = _splat(builder, first), _splat(builder, second)
        values = [
            builder.fmul(vector, factors[part // 2])
            for part, vector in enumerate(decode(builder, stored))
        ]
        return context.make_tuple(builder, signature.return_type, values)

    kinds = (memory, types.int64, types.float32, types.float32)
    return types.UniTuple(lanes, 4)(*kinds), generate


@intrinsic
def step_of(typing_context, steps, scales, offset):
    """The float32 of `steps` that the byte at `offset` selects."""

    def generate(context, builder, signature, arguments):
        steps, *place = arguments
        scale = builder.load(_pointer(context, builder, signature.args[1], *place, _I8), align=1)
        offset = builder.shl(builder.zext(scale, _I64), _I64(2))
        step = _pointer(context, builder, signature.args[0], steps, offset, _F32)
        return builder.load(step, align=4)

    return types.float32(steps, scales, types.int64), generate


def _e2m1_by_table(builder, stored):
    """Four times eight float32 of sixteen bytes: a code's upper two bytes are looked up in two
    tables, one instruction each (AVX2), and the lower two are zero.

    Twelve instructions, because no element crosses a register's middle after the first: there, in
    each half, a 32-bit number has two bytes that are four apart, a shift puts their upper nibbles
    above them, and codes e, e + 8, e + 1, e + 9 lie side by side. Looked up they are two numbers of
    16 bits for each of 32, the lower one of the first vector and the upper one of the second.
    """

    def shuffled(x, y, picks):
        mask = ir.Constant(ir.VectorType(_I32, len(picks)), [_I32(pick) for pick in picks])
        return builder.shuffle_vector(x, y, mask)

    zeros = ir.Constant(ir.VectorType(_I8, 2 * WIDTH), None)
    firsts = [part + group + each for part in (0, 2) for group in (0, WIDTH) for each in (0, 1)]
    spread = [pick for first in firsts for pick in (first, first + 4, 2 * WIDTH, 2 * WIDTH)]
    pairs = builder.bitcast(shuffled(stored, zeros, spread), ir.VectorType(_I32, WIDTH))
    nibbles = builder.or_(pairs, builder.shl(pairs, _same(_I32, 12)))
    nibbles = builder.and_(nibbles, _same(_I32, 0x0F0F0F0F))
    codes = builder.bitcast(nibbles, ir.VectorType(_I8, 4 * WIDTH))
    lower, upper = (
        _call(builder, "llvm.x86.avx2.pshuf.b", _bytes(table), codes) for table in _E2M1_BYTES
    )
    vectors = []
    for group in (0, WIDTH):
        at = [half + group + place for half in (0, 2 * WIDTH) for place in range(WIDTH)]
        both = shuffled(lower, upper, [pick for place in at for pick in (place, place + 4 * WIDTH)])
        words = builder.bitcast(both, ir.VectorType(_I32, WIDTH))
        for bits in (
            builder.shl(words, _same(_I32, 16)),
            builder.and_(words, _same(_I32, 0xFFFF0000)),
        ):
            vectors.append(builder.bitcast(bits, _LANES))
    return vectors


def _bytes(table):
    return ir.Constant(ir.VectorType(_I8, len(table)), [_I8(byte) for byte in table])


def _e2m1_by_halves(builder, stored):
    """Four times eight float32 of sixteen bytes, with nothing but shifts and conversions.

    A byte holds two codes; as the two bytes of a 16-bit number, low nibble in the lower, they are
    in order. A code's sign, exponent and mantissa then move to where a half's upper byte has them,
    and a zero byte is put before each.
    """
    count = 2 * WIDTH

    def same(value):
        return _same(_I16, value, count)

    wide = builder.zext(stored, ir.VectorType(_I16, count))
    pairs = builder.or_(wide, builder.shl(wide, same(4)))
    sign = builder.and_(builder.shl(pairs, same(4)), same(0x8080 - 0x10000))
    # The upper nibble of the lower byte still holds the second code: the mask leaves it out.
    rest = builder.and_(builder.shl(pairs, same(1)), same(0x0E0E))
    upper = builder.bitcast(builder.or_(sign, rest), ir.VectorType(_I8, 2 * count))
    zeros = _same(_I8, 0, 2 * count)
    picks = [pick for byte in range(2 * count) for pick in (0, 2 * count + byte)]
    mask = ir.Constant(ir.VectorType(_I32, 4 * count), [_I32(pick) for pick in picks])
    halves = builder.bitcast(
        builder.shuffle_vector(zeros, upper, mask), ir.VectorType(_HALF, 2 * count)
    )
    return [
        builder.fpext(_slice(builder, halves, place * WIDTH, WIDTH), _LANES) for place in range(4)
    ]
