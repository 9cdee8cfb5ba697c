"""Conversions between float32 and what is stored, exact, and an exponential; device functions.

Roundings are to nearest, ties to even, by integer arithmetic on the bits: the same bytes on every
device and in the interpreter, whose own casts round ties away. Decoding multiplies by a power of
two, which is exact for subnormal numbers too. Neighbours: `kv_pages` encodes with these,
`kv_operands` decodes.
"""

from __future__ import annotations

import triton.language as tl

from moe_kernels.gpu.jit import compiled

INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
E4M3_LARGEST = tl.constexpr(0x7E)
E4M3_NAN = tl.constexpr(0x7F)
E4M3_EXPONENT = tl.constexpr(2.0**120)
"""What lifts an E4M3 pattern, moved up 20 bits, to its value."""
E4M3_NORMAL = tl.constexpr(0x3C800000)
"""Bits of 2⁻⁶, the smallest normal E4M3."""
WHOLE = tl.constexpr(8388608.0)
"""2²³: a float32 this large has no fraction, so adding it rounds to a whole number."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(0.693359375)
"""Nine bits: times a whole number of eight it is exact."""
LN2_LOW = tl.constexpr(-2.12194440e-4)
EXP_FROM = tl.constexpr(-104.0)
EXP_TO = tl.constexpr(89.0)


@compiled
def bits(x: tl.tensor) -> tl.tensor:
    return x.to(tl.uint32, bitcast=True)


@compiled
def rounded_bfloat16(x: tl.tensor) -> tl.tensor:
    pattern = bits(x)
    nearest = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
    is_nan = (pattern & MAGNITUDE) > INFINITY_BITS
    kept = tl.where(is_nan, (pattern >> 16) | 0x40, nearest)
    return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@compiled
def rounded(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Float32 as float32, bfloat16 or float16."""
    if DTYPE == tl.bfloat16:
        y = rounded_bfloat16(x)
    else:
        y = x.to(DTYPE)
    return y


@compiled
def widened_bfloat16(x: tl.tensor) -> tl.tensor:
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@compiled
def widened(x: tl.tensor) -> tl.tensor:
    if x.dtype == tl.bfloat16:
        y = widened_bfloat16(x)
    else:
        y = x.to(tl.float32)
    return y


@compiled
def encode_e4m3(x: tl.tensor) -> tl.tensor:
    """uint32; beyond 448 stays there, NaN is 0x7F with its sign."""
    pattern = bits(x)
    size = pattern & MAGNITUDE
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = bits(tl.abs(x) * 512.0 + WHOLE) & 0xF
    code = tl.where(size < E4M3_NORMAL, subnormal, tl.minimum(normal, E4M3_LARGEST))
    code = tl.where(size > INFINITY_BITS, E4M3_NAN, code)
    return code | ((pattern >> 24) & 0x80)


@compiled
def decode_e4m3(code: tl.tensor) -> tl.tensor:
    """Float32 of uint32 codes."""
    pattern = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    value = pattern.to(tl.float32, bitcast=True) * E4M3_EXPONENT
    return tl.where((code & 0x7F) == E4M3_NAN, float("nan"), value)


@compiled
def encode_e2m1(x: tl.tensor) -> tl.tensor:
    """uint32 codes: how many midpoints lie below, those beside an odd code counting from
    themselves on, and the sign. NaN is 7."""
    size = tl.abs(x)
    code = (
        (size > 0.25).to(tl.uint32)
        + (size >= 0.75).to(tl.uint32)
        + (size > 1.25).to(tl.uint32)
        + (size >= 1.75).to(tl.uint32)
        + (size > 2.5).to(tl.uint32)
        + (size >= 3.5).to(tl.uint32)
        + (size > 5.0).to(tl.uint32)
    )
    code = tl.where(bits(size) > INFINITY_BITS, 7, code)
    return code | ((bits(x) >> 28) & 8)


@compiled
def decode_e2m1_small(code: tl.tensor) -> tl.tensor:
    """Float32 of uint32 codes, times 2⁻¹²⁶: exponent and mantissa moved to where float32's are."""
    return (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@compiled
def decode_e8m0(scale: tl.tensor) -> tl.tensor:
    """Float32 of int32 scales; 0 is 2⁻¹²⁷, which has no normal pattern, and 255 NaN."""
    pattern = tl.where(scale == 0, 1 << 22, scale << 23)
    return tl.where(scale == 255, float("nan"), pattern.to(tl.float32, bitcast=True))


@compiled
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """2^exponent for int32 −126 ≤ exponent ≤ 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@compiled
def exponential(x: tl.tensor) -> tl.tensor:
    """e^x to two units of the last place, infinite from 88.73 on (Moshier, Cephes `expf`)."""
    x = tl.where(x < EXP_FROM, EXP_FROM, x)
    x = tl.where(x > EXP_TO, EXP_TO, x)
    turns = tl.floor(x * LOG2_E + 0.5)
    r = x - turns * LN2_HIGH
    r = r - turns * LN2_LOW
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * (r * r) + r + 1.0
    # Two factors: 2^128 and the subnormal powers have no pattern of their own. NaN has no turns.
    whole = tl.where(turns == turns, turns, 0.0).to(tl.int32)
    first = whole >> 1
    return p * power_of_two(first) * power_of_two(whole - first)
