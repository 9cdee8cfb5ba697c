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
from numba import types

from moe_kernels.cpu.apart import Slot, call_apart
from moe_kernels.cpu.jit import Array, compiled, inner
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
from moe_kernels.cpu.parts import meet, new_board, parts_for, take, take_next
from moe_kernels.cpu.small_codes import (
    bits_of,
    e2m1_of,
    e4m3_of_magnitude,
    float_of,
    largest_magnitude_bits,
    store_codes,
)
from moe_kernels.cpu.team import together

FROM_STEP = np.float32(2.0**-14)
"""The tables of `kv_codes` have the steps of E2M1 times 2¹⁴."""
STANDARD, FOUR_OVER_SIX = np.float32(6.0), np.float32(4.0)
_INFINITY_BITS = np.int32(0x7F800000)
_FP32_NAN = np.float32(np.nan)


@compiled
def encode_all(
    x_TND: Array,
    slots_T: Array,
    threads: int,
    block_size: int,
    side: StoredSide,
    global_scale: np.float32,
    four_over_six: bool,
    center_ND: Array,
    channel_ND: Array,
) -> None:
    """`encode_range` of all tokens with up to so many threads."""
    together(
        _walk, threads, new_board(1), x_TND, slots_T, parts_for(threads), block_size, side,
        global_scale, four_over_six, center_ND, channel_ND,
    )  # fmt: skip


@inner
def _walk(
    board, x_TND, slots_T, parts, block_size, side, global_scale, four_over_six, center_ND,
    channel_ND,
):  # fmt: skip
    num_tokens = len(slots_T)
    part = take(board, 0)
    while part < parts:
        encode_range(
            x_TND, slots_T, num_tokens * part // parts, num_tokens * (part + 1) // parts,
            block_size, side, global_scale, four_over_six, center_ND, channel_ND,
        )  # fmt: skip
        part = take_next(board, 0)
    meet(board, 0, parts)


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
    for token in range(begin, end):
        block, offset = slots_T[token] // block_size, slots_T[token] % block_size
        for head in range(x_TND.shape[1]):
            for element in range(width):
                x_D[element] = x_TND[token, head, element]
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
                _put_mxfp4(x_D, side.data, at, side.scales, scale_at)
            else:
                _put_nvfp4(
                    x_D, global_scale, four_over_six, side.steps, side.data, at, side.scales,
                    scale_at,
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
    for element in range(len(x_D)):
        ratio = x_D[element] / global_scale
        sign = np.uint8((bits_of(ratio) >> 24) & 0x80)
        data[at + element] = sign | e4m3_of_magnitude(np.abs(ratio))


@inner
def _put_nvfp4(x_D, global_scale, four_over_six, steps, data, at, scales, scale_at):
    for place in range(len(x_D) // 16):
        x_at = np.int64(64 * place)
        largest = float_of(largest_magnitude_bits(x_D, x_at))
        scale = _nvfp4_scale(largest, STANDARD, global_scale)
        codes, error = e2m1_of(x_D, x_at, steps[scale] * FROM_STEP)
        if four_over_six:
            other = _nvfp4_scale(largest, FOUR_OVER_SIX, global_scale)
            other_codes, other_error = e2m1_of(x_D, x_at, steps[other] * FROM_STEP)
            # Choices, not a branch: which of the two it is cannot be guessed.
            codes = other_codes if other_error < error else codes
            scale = other if other_error < error else scale
        store_codes(data, np.int64(at + place * 8), codes)
        scales[scale_at + place] = scale


@inner
def _nvfp4_scale(largest, over, global_scale):
    """The E4M3 byte of largest / (over · global scale)."""
    return e4m3_of_magnitude(np.float32(largest / np.float32(over * global_scale)))


@inner
def _put_mxfp4(x_D, data, at, scales, scale_at):
    for place in range(len(x_D) // 32):
        x_at = np.int64(128 * place)
        bits = max(
            largest_magnitude_bits(x_D, x_at), largest_magnitude_bits(x_D, np.int64(x_at + 64))
        )
        if bits > _INFINITY_BITS:
            scale, step = 255, _FP32_NAN
        else:
            scale = max(min(np.int64(bits >> 23), 254) - 2, 0)
            # 2⁻¹²⁷ has no exponent of its own.
            step = float_of(np.int32(scale << 23 if scale else 1 << 22))
        for half in range(2):
            codes, _ = e2m1_of(x_D, np.int64(x_at + 64 * half), step)
            store_codes(data, np.int64(at + place * 16 + 8 * half), codes)
        scales[scale_at + place] = scale
