"""Stored keys and values as multiplicands of the tensor cores, exact, decoded in registers.

Codes of two bits of mantissa times a scale of four, and E4M3, fit into bfloat16's eight bits, so
they are decoded to bfloat16 without a rounding, as bfloat16 pages are already. The other factor is
float32, cut into three bfloat16 pieces of eight bits each that add up to it exactly: three products
with float32 sums instead of one, which a decode step, bound by memory, has time for. float32 and
float16 pages are multiplied as float32.
What is decoded is the value over its side's *unit*, which the caller multiplies with once: the
global scale, and for NVFP4 the power of two that saves a multiplication per element.
An infinite element is exact, except that an infinite key times a zero piece is NaN.
Neighbours: `sides` describes the pages, `paged_attention` multiplies, `numbers` are the codes.
"""

from __future__ import annotations

import triton.language as tl

from moe_kernels.gpu.jit import compiled, dot
from moe_kernels.gpu.numbers import INFINITY_BITS, bits, decode_e2m1_small, decode_e4m3, decode_e8m0
from moe_kernels.gpu.sides import StoredSide

_NVFP4_UNIT = 2.0**66
NVFP4_LIFT = tl.constexpr(2.0**60)
"""Codes are decoded times 2⁻¹²⁶: 126 = 66 + 60, and no scale times 2⁶⁰ leaves float32."""
MXFP4_LIFT = tl.constexpr(2.0**126)
"""MXFP4's own scales may be as small or as large as float32 goes: nothing is left to the unit."""


def unit(side: StoredSide) -> float:
    return side.global_scale * (_NVFP4_UNIT if side.code == "nvfp4" else 1.0)


@compiled
def load_pairs(
    data: tl.tensor,
    scales: tl.tensor,
    vector: tl.tensor,
    has: tl.tensor,
    CODE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Even and odd elements of FP4 vectors [N], bfloat16 [N, PADDED / 2] each; zeros where `has` is
    not."""
    BYTES: tl.constexpr = 8 if CODE == "nvfp4" else 16
    HALF: tl.constexpr = PADDED // 2
    GROUPS: tl.constexpr = HALF // BYTES
    NUM_SCALES: tl.constexpr = WIDTH // (2 * BYTES)
    at = tl.arange(0, HALF)[None, :]
    group = tl.arange(0, GROUPS)[None, :]
    packed = tl.load(
        data + vector[:, None] * (WIDTH // 2) + at, mask=has[:, None] & (2 * at < WIDTH), other=0
    ).to(tl.uint32)
    scale = tl.load(
        scales + vector[:, None] * NUM_SCALES + group,
        mask=has[:, None] & (group < NUM_SCALES),
        other=0,
    )
    even, odd = decode_e2m1_small(packed), decode_e2m1_small(packed >> 4)
    if CODE == "nvfp4":
        step = decode_e4m3(scale.to(tl.uint32)) * NVFP4_LIFT
    else:
        step = decode_e8m0(scale.to(tl.int32))
        even, odd = even * MXFP4_LIFT, odd * MXFP4_LIFT
    steps = tl.broadcast_to(step[:, :, None], (vector.shape[0], GROUPS, BYTES))
    steps = tl.reshape(steps, (vector.shape[0], HALF))
    return exact_bfloat16(even * steps), exact_bfloat16(odd * steps)


@compiled
def load_whole(
    data: tl.tensor,
    vector: tl.tensor,
    has: tl.tensor,
    CODE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> tl.tensor:
    """Vectors [N] of the other codes, bfloat16 or float32 [N, PADDED]; zeros where `has` is not."""
    at = tl.arange(0, PADDED)[None, :]
    stored = tl.load(data + vector[:, None] * WIDTH + at, mask=has[:, None] & (at < WIDTH), other=0)
    if CODE == "fp8":
        x = exact_bfloat16(decode_e4m3(stored.to(tl.uint32)))
    elif CODE == "bf16":
        x = stored
    else:
        x = stored.to(tl.float32)
    return x


@compiled
def add_product(x: tl.tensor, y: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """sums + x · y of a float32 x and a y as the functions above make it."""
    if y.dtype == tl.bfloat16:
        high = cut_bfloat16(x)
        rest = tl.where(bits(tl.abs(x)) == INFINITY_BITS, 0.0, x - high)
        middle = cut_bfloat16(rest)
        sums = dot(exact_bfloat16(rest - middle), y, sums)
        sums = dot(exact_bfloat16(middle), y, sums)
        sums = dot(exact_bfloat16(high), y, sums)
    else:
        sums = dot(x, y, sums)
    return sums


@compiled
def cut_bfloat16(x: tl.tensor) -> tl.tensor:
    """x without its lower sixteen bits, float32."""
    return (bits(x) & 0xFFFF0000).to(tl.float32, bitcast=True)


@compiled
def exact_bfloat16(x: tl.tensor) -> tl.tensor:
    """bfloat16 of numbers that it has."""
    return (bits(x) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
