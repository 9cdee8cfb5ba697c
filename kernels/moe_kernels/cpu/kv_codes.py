"""Blocks of stored keys or values as float32 in scratch memory that stays in the first-level cache.

Decoding a block once, for all queries of a tile and all heads that share it, keeps every format out
of the products: those see float32 in order of the elements, and give the same numbers for any code
that stores the same values. What is decoded is bit for bit what the reference reads.
A scale byte, of whichever code, is looked up in a table of 256 float32 steps that has the tensor's
global scale in it, and the power of two by which `small_floats` reads too small. So an MXFP4
block whose scale is 2¹¹⁴ or more reads as infinite or NaN.
A side is a `StoredSide`, arrays, to Python and to whoever holds the memory, and a `SideAt`, nothing
but numbers, in the loops over blocks (`lanes` says why).
Neighbours: `lanes` decodes eight numbers, `attention` reads blocks, `attention_stored` multiplies
them undecoded, `moe_kernels.kv_pages` owns the pages.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import types

from moe_kernels.cpu.jit import inner
from moe_kernels.cpu.lanes import (
    WIDTH,
    address_of,
    load,
    load_bf16,
    load_float,
    load_fp16,
    multiply,
    prefetch,
    splat,
    store,
)
from moe_kernels.cpu.small_floats import load_e2m1, load_e4m3, step_of, store_e4m3
from moe_kernels.kv_formats import LatentShape, Side
from moe_kernels.kv_pages import KvPages, PagePart

FP32, BF16, FP16, FP8, NVFP4, MXFP4 = range(6)
_CODES = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "fp8": FP8, "nvfp4": NVFP4, "mxfp4": MXFP4}
_E4M3_FACTOR, _E2M1_FACTOR = 2.0**8, 2.0**14
LINE_BYTES = 64
TOKENS_AT_ONCE = 4
"""That are multiplied side by side; a block has a multiple."""


class StoredSide(NamedTuple):
    """Where a side of every block lies in a part's bytes, and how to read it."""

    data: np.ndarray
    scales: np.ndarray
    """Uint8, flat; `scales` empty where the code has none."""
    steps: np.ndarray
    """Float32 [256] by scale byte; of FP8 and plain codes the first alone counts."""
    sizes: np.ndarray
    """Int64, see the columns below: one array is quicker to hand to a kernel than ten numbers."""


STORED_SIDE = types.NamedTuple(
    [types.Array(each, 1, "C") for each in (types.uint8, types.uint8, types.float32, types.int64)],
    StoredSide,
)
"""Its type to kernels."""
CODE, VECTOR_WIDTH, ROW_BYTES, HEAD_BYTES, BLOCK_BYTES, FIRST_BYTE = range(6)
"""Columns of `StoredSide.sizes`. VECTOR_WIDTH: elements of a vector, 0 = no such side. Head h of
block b is at FIRST_BYTE + b · BLOCK_BYTES + h · HEAD_BYTES."""
SCALE_ROW_BYTES, SCALE_HEAD_BYTES, SCALE_BLOCK_BYTES, SCALE_FIRST_BYTE = range(6, 10)


def readable(pages: KvPages) -> bool:
    """Whether the kernels take these widths and this block size."""
    granule = {NVFP4: 2 * WIDTH * 2, MXFP4: 2 * WIDTH * 2}
    latent = isinstance(pages.shape, LatentShape)
    return pages.block_size % TOKENS_AT_ONCE == 0 and all(
        page.part.width % (granule.get(_CODES[page.part.code], WIDTH) if latent else WIDTH) == 0
        for page in pages.parts
    )


def stored_sides(pages: KvPages) -> dict[Side, StoredSide]:
    """Views of the pages' memory: they see whatever is written later."""
    return {
        side: _stored_side(page, place)
        for page in pages.parts
        for place, side in enumerate(page.part.sides)
    }


def no_side(like: StoredSide) -> StoredSide:
    return like._replace(sizes=np.zeros_like(like.sizes))


def _stored_side(page: PagePart, place: int) -> StoredSide:
    data = page.data.view(torch.uint8)
    sizes = _sizes(data.shape, place)
    if page.scales is None:
        scales, scale_sizes = np.empty(0, dtype=np.uint8), (0, 0, 0, 0)
    else:
        scales, scale_sizes = page.scales.numpy().reshape(-1), _sizes(page.scales.shape, place)
    code = _CODES[page.part.code]
    described = np.array([code, page.part.width, *sizes, *scale_sizes], dtype=np.int64)
    return StoredSide(data.numpy().reshape(-1), scales, _steps(page, place), described)


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


@inner
def head_at(side, block, head):
    """Where a head's rows of a block begin in `data`."""
    sizes = side.sizes
    return sizes[FIRST_BYTE] + block * sizes[BLOCK_BYTES] + head * sizes[HEAD_BYTES]


@inner
def scales_at(side, block, head):
    """Where the scales of a head's rows of a block begin."""
    sizes = side.sizes
    in_block = block * sizes[SCALE_BLOCK_BYTES] + head * sizes[SCALE_HEAD_BYTES]
    return sizes[SCALE_FIRST_BYTE] + in_block


class SideAt(NamedTuple):
    """A `StoredSide` as plain numbers, for the loops over blocks."""

    data: int
    scales: int
    steps: int
    """Addresses; head h of block b is at data + b · block_bytes + h · head_bytes."""
    code: int
    width: int
    row_bytes: int
    head_bytes: int
    block_bytes: int
    scale_row_bytes: int
    scale_head_bytes: int
    scale_block_bytes: int


@inner
def side_at(side):
    """A caller has to hold the side."""
    sizes = side.sizes
    return SideAt(
        address_of(side.data) + sizes[FIRST_BYTE],
        address_of(side.scales) + sizes[SCALE_FIRST_BYTE],
        address_of(side.steps),
        sizes[CODE],
        sizes[VECTOR_WIDTH],
        sizes[ROW_BYTES],
        sizes[HEAD_BYTES],
        sizes[BLOCK_BYTES],
        sizes[SCALE_ROW_BYTES],
        sizes[SCALE_HEAD_BYTES],
        sizes[SCALE_BLOCK_BYTES],
    )


@inner
def rows_of(side, block, head):
    """The address of a head's rows of a block, in a `SideAt`."""
    return side.data + block * side.block_bytes + head * side.head_bytes


@inner
def scales_of(side, block, head):
    return side.scales + block * side.scale_block_bytes + head * side.scale_head_bytes


@inner
def second_scale(side):
    """How far the scale of E2M1's second sixteen elements lies behind that of the first."""
    return 1 if side.code == NVFP4 else 0


@inner
def decode_block(side, block, head, num_tokens, target, target_row_bytes):
    """Write a head's first `num_tokens` rows of a block as float32 to the address `target`."""
    at, scale_at = rows_of(side, block, head), scales_of(side, block, head)
    if target_row_bytes == side.width * 4:
        _decode_run(side, at, scale_at, num_tokens, target)
        return
    for token in range(num_tokens):
        _decode_run(side, at, scale_at, 1, target + token * target_row_bytes)
        at += side.row_bytes
        scale_at += side.scale_row_bytes


@inner
def _decode_run(side, at, scale_at, num_rows, to):
    """Rows that follow each other on both sides."""
    code, end = side.code, to + num_rows * side.width * 4
    if code == NVFP4 or code == MXFP4:
        _decode_e2m1(at, scale_at, second_scale(side), side.steps, to, end)
    elif code == BF16:
        _decode_bf16(at, to, end)
    elif code == FP8:
        _decode_e4m3(at, load_float(side.steps, 0), to, end)
    elif code == FP16:
        _decode_fp16(at, to, end)
    else:
        _copy_fp32(at, to, end)


@inner
def _decode_e2m1(at, scale_at, second, steps, to, end):
    """Thirty-two elements at a time: rows that follow each other have an even number of scales."""
    while to < end:
        first_step, second_step = step_of(steps, scale_at, 0), step_of(steps, scale_at, second)
        a, b, c, d = load_e2m1(at, 0, first_step, second_step)
        store(to, 0, a)
        store(to, 32, b)
        store(to, 64, c)
        store(to, 96, d)
        at += 16
        scale_at += 1 + second
        to += 128


@inner
def _decode_bf16(at, to, end):
    # Four at a time: the processor would wait for the loop's own instructions otherwise.
    while to + 128 <= end:
        store(to, 0, load_bf16(at, 0))
        store(to, 32, load_bf16(at, 16))
        store(to, 64, load_bf16(at, 32))
        store(to, 96, load_bf16(at, 48))
        to += 128
        at += 64
    while to < end:
        store(to, 0, load_bf16(at, 0))
        to += 32
        at += 16


@inner
def _decode_fp16(at, to, end):
    while to < end:
        store(to, 0, load_fp16(at, 0))
        to += 32
        at += 16


@inner
def _decode_e4m3(at, step, to, end):
    while to + 64 <= end:
        store_e4m3(at, 0, to, 0, step)
        to += 64
        at += 16
    if to < end:
        store(to, 0, multiply(load_e4m3(at, 0), splat(step)))


@inner
def _copy_fp32(at, to, end):
    while to < end:
        store(to, 0, load(at, 0))
        to += 32
        at += 32


@inner
def prefetch_block(side, block, head):
    at = rows_of(side, block, head)
    for byte in range(0, side.head_bytes, LINE_BYTES):
        prefetch(at, byte)
    if side.scale_head_bytes:
        at = scales_of(side, block, head)
        for byte in range(0, side.scale_head_bytes, LINE_BYTES):
            prefetch(at, byte)
