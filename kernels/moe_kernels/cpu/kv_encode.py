"""Keys and values rounded or quantised and written to their places, with numba.

The bytes are those of the reference, which has the rules (`moe_kernels.fp8`, `fp4`, `mxfp4`): the
same comparisons, products, divisions and roundings, one element after the other, in loops that the
compiler may widen because no sum depends on their order. The squared errors of FourOverSix are
added as the reference adds them. Of a NaN only that it is read as NaN is promised.
Neighbours: `kv_codes` has the places of a side, `kv_pages` hands over the tokens.

Letters: T tokens, N heads, D width, B elements of a scale's block.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from numba import prange, types

from moe_kernels.cpu.apart import Slot, call_apart
from moe_kernels.cpu.jit import Array, compiled, inner, parallel
from moe_kernels.cpu.kv_codes import (
    BF16,
    CODE,
    FP8,
    FP16,
    FP32,
    MXFP4,
    ROW_BYTES,
    SCALE_ROW_BYTES,
    STORED_SIDE,
    StoredSide,
    head_at,
    scales_at,
)
from moe_kernels.cpu.lanes import load, store, store_fp16

E4M3_MAX = np.float32(448.0)
E4M3_NAN = np.uint8(0x7F)
E4M3_SMALLEST_NORMAL = np.float32(2.0**-6)
SUBNORMALS_PER_ONE = np.float32(2.0**9)
ROUNDER = np.float32(2.0**23)
"""x + ROUNDER − ROUNDER is the whole number next to x, even at a midpoint, of 0 ≤ x < 2²²."""
FROM_STEP = np.float32(2.0**-14)
"""The tables of `kv_codes` have the steps of E2M1 times 2¹⁴."""
B0, B1, B2, B3, B4, B5, B6 = (
    np.float32(bound)
    for bound in (0.25, np.nextafter(np.float32(0.75), np.float32(0)), 1.25,
                  np.nextafter(np.float32(1.75), np.float32(0)), 2.5,
                  np.nextafter(np.float32(3.5), np.float32(0)), 5.0)
)  # fmt: skip
"""The largest float32 that still rounds to each magnitude of E2M1, see `moe_kernels.e2m1`."""
STANDARD, FOUR_OVER_SIX = np.float32(6.0), np.float32(4.0)


@parallel
def encode_parallel(
    x_TND: Array,
    slots_T: Array,
    num_parts: int,
    block_size: int,
    side: StoredSide,
    global_scale: np.float32,
    four_over_six: bool,
    center_ND: Array,
    channel_ND: Array,
) -> None:
    """`encode_range` of all tokens in so many parts."""
    num_tokens = len(slots_T)
    for part in prange(num_parts):
        encode_range(
            x_TND, slots_T, num_tokens * np.int64(part) // num_parts,
            num_tokens * (np.int64(part) + 1) // num_parts, block_size, side, global_scale,
            four_over_six, center_ND, channel_ND,
        )  # fmt: skip


@compiled
def encode_range(
    x_TND: Array,
    slots_T: Array,
    begin: int,
    end: int,
    block_size: int,
    side: StoredSide,
    global_scale: np.float32,
    four_over_six: bool,
    center_ND: Array,
    channel_ND: Array,
) -> None:
    """Write tokens begin ≤ t < end of one side. Empty center or channel = none.

    `ENCODING.fill()` comes before the first call.
    """
    call_apart(
        "encode", x_TND, slots_T, begin, end, block_size, side, global_scale, four_over_six,
        center_ND, channel_ND,
    )  # fmt: skip


def _encode(
    x_TND, slots_T, begin, end, block_size, side, global_scale, four_over_six, center_ND, channel_ND
):
    width = x_TND.shape[2]
    x_D = np.empty(width, dtype=np.float32)
    codes_B = np.empty(32, dtype=np.uint8)
    others_B = np.empty(32, dtype=np.uint8)
    errors_B = np.empty(16, dtype=np.float32)
    for token in range(begin, end):
        block, offset = slots_T[token] // block_size, slots_T[token] % block_size
        for head in range(x_TND.shape[1]):
            x_D[:] = x_TND[token, head]
            if len(center_ND):
                for element in range(width):
                    x_D[element] -= center_ND[head, element]
            if len(channel_ND):
                for element in range(width):
                    x_D[element] /= channel_ND[head, element]
            at = head_at(side, block, head)
            at += offset * side.sizes[ROW_BYTES]
            scale_at = scales_at(side, block, head)
            scale_at += offset * side.sizes[SCALE_ROW_BYTES]
            if side.sizes[CODE] == FP32:
                _put_fp32(x_D, side.data, at)
            elif side.sizes[CODE] == BF16:
                _put_bf16(x_D, side.data.view(np.uint16), at // 2)
            elif side.sizes[CODE] == FP16:
                _put_fp16(x_D, side.data, at)
            elif side.sizes[CODE] == FP8:
                _put_e4m3(x_D, global_scale, side.data, at)
            elif side.sizes[CODE] == MXFP4:
                _put_mxfp4(x_D, codes_B, side.data, at, side.scales, scale_at)
            else:
                _put_nvfp4(
                    x_D, global_scale, four_over_six, side.steps, codes_B, others_B, errors_B,
                    side.data, at, side.scales, scale_at,
                )  # fmt: skip


_MATRIX = types.Array(types.float32, 2, "C")
ENCODING = Slot(
    "encode",
    _encode,
    [
        types.Array(types.float32, 3, "C"),
        types.Array(types.int64, 1, "C"),
        *[types.int64] * 3,
        STORED_SIDE,
        types.float32,
        types.boolean,
        _MATRIX,
        _MATRIX,
    ],
)


@inner
def _put_fp32(x_D, data, at):
    x_bytes = x_D.view(np.uint8)
    for byte in range(0, len(x_bytes), 32):
        store(data, np.int64(at + byte), load(x_bytes, np.int64(byte)))


@inner
def _put_fp16(x_D, data, at):
    x_bytes = x_D.view(np.uint8)
    for byte in range(0, len(x_bytes), 32):
        store_fp16(data, np.int64(at + byte // 2), load(x_bytes, np.int64(byte)))


@inner
def _put_bf16(x_D, data, at):
    bits_D = x_D.view(np.uint32)
    for element in range(len(x_D)):
        bits = bits_D[element]
        nearest = (
            bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        ) >> np.uint32(16)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        data[at + element] = np.uint16(np.uint32(0x7FC0) if is_nan else nearest)


@inner
def _put_e4m3(x_D, global_scale, data, at):
    scaled = np.empty(1, dtype=np.float32)
    for element in range(len(x_D)):
        x_D[element] = x_D[element] / global_scale
    bits_D = x_D.view(np.uint32)
    for element in range(len(x_D)):
        sign = (bits_D[element] >> np.uint32(24)) & np.uint32(0x80)
        data[at + element] = np.uint8(sign) | e4m3_of_magnitude(np.abs(x_D[element]), scaled)


@inner
def e4m3_of_magnitude(value, place):
    """The E4M3 byte next to float32 `value` ≥ 0, at most 448's. `place` lends memory for its
    bits."""
    if value != value:
        return E4M3_NAN
    value = min(value, E4M3_MAX)
    if value < E4M3_SMALLEST_NORMAL:
        return np.uint8(np.float32(np.float32(value * SUBNORMALS_PER_ONE + ROUNDER) - ROUNDER))
    place[0] = value
    bits = place.view(np.uint32)[0]
    bits += np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))
    return np.uint8((bits >> np.uint32(20)) - np.uint32(120 << 3))


@inner
def _largest_magnitude(x_B):
    """NaN where there is one."""
    largest = np.float32(0.0)
    for element in range(len(x_B)):
        magnitude = np.abs(x_B[element])
        if magnitude > largest or magnitude != magnitude:
            largest = magnitude
            if magnitude != magnitude:
                break
    return largest


@inner
def _e2m1_codes(x_B, step, codes_B):
    """The code next to each x / step; zeros that keep their sign where the step is zero."""
    for element in range(len(x_B)):
        x = x_B[element]
        ratio = x / step if step != np.float32(0.0) else x * np.float32(0.0)
        magnitude = np.abs(ratio)
        # Not «greater»: a NaN counts as the largest.
        code = np.uint8(not magnitude <= B0) + np.uint8(not magnitude <= B1)
        code += np.uint8(not magnitude <= B2) + np.uint8(not magnitude <= B3)
        code += np.uint8(not magnitude <= B4) + np.uint8(not magnitude <= B5)
        code += np.uint8(not magnitude <= B6)
        sign = np.uint8(8) if np.signbit(ratio) else np.uint8(0)
        codes_B[element] = np.uint8(code) | sign


@inner
def _pack(codes_B, count, data, at):
    for pair in range(count // 2):
        data[at + pair] = codes_B[2 * pair] | np.uint8(codes_B[2 * pair + 1] << np.uint8(4))


E2M1_VALUES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)


@inner
def _squared_error(x_B, codes_B, step, errors_B):
    for element in range(16):
        difference = np.float32(E2M1_VALUES[codes_B[element]] * step) - x_B[element]
        errors_B[element] = difference * difference
    half = 8
    while half:
        for element in range(half):
            errors_B[element] += errors_B[element + half]
        half //= 2
    return errors_B[0]


@inner
def _nvfp4_scale(largest, over, global_scale, place):
    """The E4M3 byte of largest / (over · global scale)."""
    return e4m3_of_magnitude(np.float32(largest / np.float32(over * global_scale)), place)


@inner
def _put_nvfp4(
    x_D, global_scale, four_over_six, steps, codes_B, others_B, errors_B, data, at, scales, scale_at
):
    for place in range(len(x_D) // 16):
        x_B = x_D[place * 16 : place * 16 + 16]
        largest = _largest_magnitude(x_B)
        scale = _nvfp4_scale(largest, STANDARD, global_scale, errors_B)
        step = steps[scale] * FROM_STEP
        _e2m1_codes(x_B, step, codes_B)
        if four_over_six:
            other = _nvfp4_scale(largest, FOUR_OVER_SIX, global_scale, errors_B)
            other_step = steps[other] * FROM_STEP
            _e2m1_codes(x_B, other_step, others_B)
            error = _squared_error(x_B, codes_B, step, errors_B)
            if _squared_error(x_B, others_B, other_step, errors_B) < error:
                codes_B[:16] = others_B[:16]
                scale = other
        _pack(codes_B, 16, data, at + place * 8)
        scales[scale_at + place] = scale


@inner
def _put_mxfp4(x_D, codes_B, data, at, scales, scale_at):
    magnitude = np.empty(1, dtype=np.float32)
    bits = magnitude.view(np.uint32)
    for place in range(len(x_D) // 32):
        x_B = x_D[place * 32 : place * 32 + 32]
        magnitude[0] = _largest_magnitude(x_B)
        if magnitude[0] != magnitude[0]:
            scale = 255
            magnitude[0] = np.float32(np.nan)
        else:
            scale = max(min(np.int64(bits[0] >> np.uint32(23)), 254) - 2, 0)
            # 2⁻¹²⁷ has no exponent of its own.
            bits[0] = np.uint32(scale << 23) if scale else np.uint32(1 << 22)
        _e2m1_codes(x_B, magnitude[0], codes_B)
        _pack(codes_B, 32, data, at + place * 16)
        scales[scale_at + place] = scale
