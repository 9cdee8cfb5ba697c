"""Float32 rounded to the codes of four and eight bits, to nearest even, sixteen elements at a time.

E2M1 has steps of ½ below 2, of 1 below 4 and of 2 up to 6. Added to a float32 whose last place is
worth such a step, a magnitude is rounded to it as the processor rounds every sum, and the last
three bits of the sum are its code, if those of the large number make up for the codes below. So an
element takes a dozen instructions and no table. A NaN counts as the largest.
Neighbours: `small_floats` reads what is written here, `kv_encode` finds the scales.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from moe_kernels.cpu.jit import inner
from moe_kernels.cpu.lanes import (
    _F32,
    _I8,
    _I16,
    _I32,
    _I64,
    _LANES,
    WIDTH,
    _halves,
    _load,
    _pointer,
    _same,
    _splat,
)

E4M3_MAX = np.float32(448.0)
E4M3_SMALLEST_NORMAL = np.float32(2.0**-6)
_E4M3_NAN = np.int32(0x7F)
_STEPS_PER_ONE, _ROUNDER = np.float32(2.0**9), np.float32(2.0**23)
"""Of subnormal E4M3; and the float32 whose last place is worth 1."""
_E2M1_MAX = 6.0
_E2M1_ROUNDERS = (2.0**22, 2.0**23 + 2, 2.0**24 + 8)
"""Whose last places are worth ½, 1 and 2, and whose last bits are 0, 2 and 4."""
_LANES_I32 = ir.VectorType(_I32, WIDTH)
_MAGNITUDE = 0x7FFFFFFF


@intrinsic
def bits_of(typing_context, value):
    """The bits of a float32, an int32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _I32)

    return types.int32(types.float32), generate


@intrinsic
def float_of(typing_context, bits):
    """The float32 of an int32's bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _F32)

    return types.float32(types.int32), generate


@inner
def e4m3_of_magnitude(value):
    """The code next to float32 `value` ≥ 0, at most 448's."""
    bounded = value if value < E4M3_MAX else E4M3_MAX
    bits = bits_of(bounded)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = bits_of(np.float32(bounded * _STEPS_PER_ONE + _ROUNDER)) & 0xFF
    code = subnormal if bounded < E4M3_SMALLEST_NORMAL else normal
    return np.uint8(code if value == value else _E4M3_NAN)


@intrinsic
def largest_magnitude_bits(typing_context, memory, offset):
    """Int32 of sixteen elements: bits of magnitudes are in order as these are, those of a NaN are
    the largest."""

    def generate(context, builder, signature, arguments):
        def larger(x, y):
            return builder.select(builder.icmp_signed(">", x, y), x, y)

        bits = [
            builder.and_(builder.bitcast(vector, _LANES_I32), _same(_I32, _MAGNITUDE))
            for vector in _two(context, builder, signature, arguments)
        ]
        return _halves(builder, larger(*bits), larger)

    return types.int32(memory, types.int64), generate


@intrinsic
def e2m1_of(typing_context, memory, offset, step):
    """The codes next to sixteen elements ÷ step, in eight bytes, low nibble first; and the sum of
    (code's value · step − element)². Zeros that keep their sign where the step is zero.

    The errors of elements 8 apart are added, then 4, then 2, then 1.
    """

    def generate(context, builder, signature, arguments):
        is_zero = builder.fcmp_ordered("==", arguments[2], _F32(0.0))
        divisor = _splat(builder, builder.select(is_zero, _F32(float("inf")), arguments[2]))
        step = _splat(builder, arguments[2])
        codes, errors = [], []
        for x in _two(context, builder, signature, arguments):
            code, error = _e2m1(builder, x, divisor, step)
            codes.append(code)
            errors.append(error)
        error = _halves(builder, builder.fadd(*errors), builder.fadd)
        return context.make_tuple(builder, signature.return_type, [_packed(builder, *codes), error])

    return types.Tuple((types.int64, types.float32))(memory, types.int64, types.float32), generate


@intrinsic
def store_codes(typing_context, memory, offset, codes):
    """The eight bytes of an int64."""

    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature.args[0], *arguments[:2], _I64)
        builder.store(arguments[2], pointer, align=1)
        return context.get_dummy_value()

    return types.void(memory, types.int64, types.int64), generate


def _two(context, builder, signature, arguments):
    """Two vectors at the offset."""
    memory, offset = arguments[:2]
    for at in (offset, builder.add(offset, _I64(4 * WIDTH))):
        yield _load(context, builder, signature, (memory, at), _F32)


def _e2m1(builder, x, divisor, step):
    """Codes as int32, and squared errors."""
    bits = builder.bitcast(x, _LANES_I32)
    magnitude = builder.bitcast(builder.and_(bits, _same(_I32, _MAGNITUDE)), _LANES)
    ratio = builder.fdiv(magnitude, divisor)

    def below(bound):
        return builder.fcmp_ordered("<", ratio, _same(_F32, bound))

    half, one, two = (_same(_F32, rounder) for rounder in _E2M1_ROUNDERS)
    rounder = builder.select(below(4.0), one, two)
    rounder = builder.select(below(2.0), half, rounder)
    bounded = builder.select(below(_E2M1_MAX), ratio, _same(_F32, _E2M1_MAX))
    total = builder.fadd(bounded, rounder)
    difference = builder.fsub(builder.fmul(builder.fsub(total, rounder), step), magnitude)
    code = builder.and_(builder.bitcast(total, _LANES_I32), _same(_I32, 7))
    sign = builder.and_(builder.lshr(bits, _same(_I32, 28)), _same(_I32, 8))
    return builder.or_(code, sign), builder.fmul(difference, difference)


def _packed(builder, first, second):
    """Two times eight codes as nibbles of an int64."""
    order = ir.Constant(ir.VectorType(_I32, 2 * WIDTH), [_I32(at) for at in range(2 * WIDTH)])
    numbers = builder.shuffle_vector(first, second, order)
    in_bytes = builder.trunc(numbers, ir.VectorType(_I8, 2 * WIDTH))
    pairs = builder.bitcast(in_bytes, ir.VectorType(_I16, WIDTH))
    pairs = builder.or_(pairs, builder.lshr(pairs, _same(_I16, 4)))
    return builder.bitcast(builder.trunc(pairs, ir.VectorType(_I8, WIDTH)), _I64)
