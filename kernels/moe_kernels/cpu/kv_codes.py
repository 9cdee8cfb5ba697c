"""Blocks of stored keys or values as float32 in scratch memory that stays in the first-level cache.

Decoding a block once, for all queries of a tile and all heads that share it, keeps every format out
of the products: those see float32 in order of the elements, and give the same numbers for any code
that stores the same values. What is decoded is bit for bit what the reference reads.
A scale byte, of whichever code, is looked up in a table of 256 float32 steps that has the tensor's
global scale in it, and the power of two by which `lanes` reads small floats too small. So an MXFP4
block whose scale is 2¹¹⁴ or more reads as infinite or NaN.
Neighbours: `lanes` decodes eight numbers, `attention` reads blocks, `moe_kernels.kv_pages` owns
the pages.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from moe_kernels.cpu.jit import compiled
from moe_kernels.cpu.lanes import (
    load,
    load_bf16,
    load_e4m3,
    load_fp16,
    multiply,
    prefetch,
    splat,
    store,
    store_e2m1,
)
from moe_kernels.kv_formats import Side
from moe_kernels.kv_pages import KvPages, PagePart

FP32, BF16, FP16, FP8, NVFP4, MXFP4 = range(6)
_CODES = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "fp8": FP8, "nvfp4": NVFP4, "mxfp4": MXFP4}
_E4M3_FACTOR, _E2M1_FACTOR = 2.0**8, 2.0**14
LINE_BYTES = 64


class StoredSide(NamedTuple):
    """Where a side of every block lies in a part's bytes, and how to read it."""

    data: np.ndarray
    scales: np.ndarray
    """Uint8, flat; `scales` empty where the code has none."""
    steps: np.ndarray
    """Float32 [256] by scale byte; of FP8 and plain codes the first alone counts."""
    code: int
    width: int
    """Elements of a vector; 0 = no such side."""
    row_bytes: int
    head_bytes: int
    block_bytes: int
    first_byte: int
    """Of the side in block 0; head h of block b is at b · block_bytes + h · head_bytes more."""
    scale_row_bytes: int
    scale_head_bytes: int
    scale_block_bytes: int
    scale_first_byte: int


def stored_sides(pages: KvPages) -> dict[Side, StoredSide]:
    """Views of the pages' memory: they see whatever is written later."""
    return {
        side: _stored_side(page, place)
        for page in pages.parts
        for place, side in enumerate(page.part.sides)
    }


def no_side(like: StoredSide) -> StoredSide:
    return like._replace(width=0)


def _stored_side(page: PagePart, place: int) -> StoredSide:
    data = page.data.view(torch.uint8)
    sizes = _sizes(data.shape, place)
    if page.scales is None:
        scales, scale_sizes = np.empty(0, dtype=np.uint8), (0, 0, 0, 0)
    else:
        scales, scale_sizes = page.scales.numpy().reshape(-1), _sizes(page.scales.shape, place)
    code = _CODES[page.part.code]
    return StoredSide(
        data.numpy().reshape(-1),
        scales,
        _steps(page, place),
        code,
        page.part.width,
        *sizes,
        *scale_sizes,
    )


def _sizes(shape: torch.Size, place: int) -> tuple[int, int, int, int]:
    """Bytes of a row, a head and a block, and where the side begins."""
    _, sides, heads, block, row = shape
    return row, block * row, sides * heads * block * row, place * heads * block * row


def _steps(page: PagePart, place: int) -> np.ndarray:
    every_byte = torch.arange(256, dtype=torch.uint8)
    code = page.part.code
    if code == "mxfp4":
        bits = every_byte.to(torch.int32) << 23
        values = bits.view(torch.float32).clone()
        values[0], values[255] = 2.0**-127, torch.nan
        return (values * _E2M1_FACTOR).numpy()
    if page.global_scales_Z is None:
        return np.ones(256, dtype=np.float32)
    global_scale = page.global_scales_Z[place]
    if code == "fp8":
        return np.full(256, float(global_scale) * _E4M3_FACTOR, dtype=np.float32)
    values = every_byte.view(torch.float8_e4m3fn).to(torch.float32) * global_scale
    return (values * _E2M1_FACTOR).numpy()


@compiled
def decode_block(side, block, head, num_tokens, target, target_at, target_row_bytes):
    """Write a head's first `num_tokens` rows of a block as float32 to `target`."""
    data_at = side.first_byte + block * side.block_bytes + head * side.head_bytes
    num_bytes = side.width * 4
    if side.code == NVFP4 or side.code == MXFP4:
        scale_at = side.scale_first_byte + block * side.scale_block_bytes
        scale_at += head * side.scale_head_bytes
        _decode_e2m1(
            side, data_at, scale_at, num_tokens, target, np.int64(target_at), target_row_bytes
        )
        return
    for token in range(num_tokens):
        row_at, to = data_at + token * side.row_bytes, target_at + token * target_row_bytes
        if side.code == BF16:
            for byte in range(0, num_bytes, 32):
                store(target, np.int64(to + byte), load_bf16(side.data, np.int64(row_at + byte // 2)))
        elif side.code == FP8:
            step = splat(side.steps[0])
            for byte in range(0, num_bytes, 32):
                value = load_e4m3(side.data, np.int64(row_at + byte // 4))
                store(target, np.int64(to + byte), multiply(value, step))
        elif side.code == FP16:
            for byte in range(0, num_bytes, 32):
                store(target, np.int64(to + byte), load_fp16(side.data, np.int64(row_at + byte // 2)))
        else:
            for byte in range(0, num_bytes, 32):
                store(target, np.int64(to + byte), load(side.data, np.int64(row_at + byte)))


@compiled
def _decode_e2m1(side, data_at, scale_at, num_tokens, target, target_at, target_row_bytes):
    data, scales, steps = side.data, side.scales, side.steps
    pieces_per_scale = 1 if side.code == NVFP4 else 2
    for token in range(num_tokens):
        at, to = data_at + token * side.row_bytes, target_at + token * target_row_bytes
        for place in range(side.scale_row_bytes):
            step = steps[scales[scale_at + token * side.scale_row_bytes + place]]
            for _ in range(pieces_per_scale):
                store_e2m1(data, np.int64(at), target, np.int64(to), step)
                at += 8
                to += 64


@compiled
def prefetch_block(side, block, head):
    at = side.first_byte + block * side.block_bytes + head * side.head_bytes
    for byte in range(0, side.head_bytes, LINE_BYTES):
        prefetch(side.data, np.int64(at + byte))
    if side.scale_head_bytes:
        at = side.scale_first_byte + block * side.scale_block_bytes + head * side.scale_head_bytes
        for byte in range(0, side.scale_head_bytes, LINE_BYTES):
            prefetch(side.scales, np.int64(at + byte))
