"""Rows of a matrix product over weight rows that stream from memory.

Few tokens (decode) are limited by reading weights, so every weight row is read from memory once:
rows go by in blocks that stay in the cache, and each block meets all tokens, a few at a time,
before the next is read. One row goes after the other: a thread's bytes then lie one behind the
other, which the processor's own prefetching follows. Several rows side by side would give the
additions of a single token more to do at once, but memory a pattern that it does not guess: a third
fewer bytes a second, even when they are asked for by name.

Many tokens (prefill) are limited by arithmetic. Then a few rows are widened to float32 once, into a
panel that stays in the nearest cache, and tokens stream past it in tiles of four rows and three
tokens: seven loads for twelve multiplications of a register, where one row and six tokens need
fourteen and the widening too.

Neighbours: `intrinsics.dot_tile` is the inner loop and fixes the order of additions, so that which
tile computes a number does not change it; `linear` and `grouped_gemm` cut output rows among threads
and call this.

Letters: T tokens, K inputs, R rows of all matrices one below the other, C outputs of one matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from moe_kernels.cpu.apart import Slot, call_apart
from moe_kernels.cpu.intrinsics import dot_tile, narrowed, rounded, widened
from moe_kernels.cpu.jit import Array, Index, compiled, inner
from moe_kernels.cpu.lanes import WIDTH, load, load_float, store
from moe_kernels.cpu.row_lanes import in_bytes, rounded_lanes

ROWS_IN_CACHE = 32
MOST_TOKENS = 6
MANY_TOKENS = 24
"""From here on widening a row once costs less than at every tile."""
NUMBERS_IN_PANEL = 4096
"""16 KiB, half of the nearest cache."""
NUMBERS_IN_CHUNK = 49152
"""192 KiB of tokens, less than half of a core's own cache."""
AHEAD = 2048
"""Bytes, about what memory delivers while it is being asked."""


@compiled
def multiply(
    weights_RK: Array,
    base: Index,
    start: Index,
    end: Index,
    inputs_TK: Array,
    first: Index,
    last: Index,
    outputs_TC: Array,
) -> None:
    """outputs[first:last, start:end] = inputs[first:last] · weights[base + start : base + end]ᵀ.

    All C-contiguous. `fill_slot` for what the weights store comes before the first call.
    """
    call_apart("multiply", weights_RK, base, start, end, inputs_TK, first, last, outputs_TC)


def fill_slot(stored: np.dtype[Any]) -> None:
    """Make `multiply` ready for weights of this type."""
    _SLOTS[stored].fill()


def _multiply(
    weights_RK: Array,
    base: Index,
    start: Index,
    end: Index,
    inputs_TK: Array,
    first: Index,
    last: Index,
    outputs_TC: Array,
) -> None:
    if last - first < MANY_TOKENS:
        _stream_rows(weights_RK, base, start, end, inputs_TK, first, last, outputs_TC)
    else:
        _stream_tokens(weights_RK, base, start, end, inputs_TK, first, last, outputs_TC)


def _slot(stored: Any) -> Slot:
    matrix, activations = types.Array(stored, 2, "C"), types.Array(types.float32, 2, "C")
    three, two = [types.int64] * 3, [types.int64] * 2
    return Slot("multiply", _multiply, [matrix, *three, activations, *two, activations])


STORED = (types.float32, types.uint16, types.int16)
"""What matrices may store, see `arrays`."""
_SLOTS = {np.dtype(str(stored)): _slot(stored) for stored in STORED}


@inner
def _stream_rows(
    weights_RK: Array,
    base: Index,
    start: Index,
    end: Index,
    inputs_TK: Array,
    first: Index,
    last: Index,
    outputs_TC: Array,
) -> None:
    for block in range(start, end, ROWS_IN_CACHE):
        block_end = min(block + ROWS_IN_CACHE, end)
        token: Index = first
        while token < last:
            tiles = (last - token + MOST_TOKENS - 1) // MOST_TOKENS
            count = (last - token + tiles - 1) // tiles
            _few_tokens(weights_RK, base, block, block_end, inputs_TK, token, count, outputs_TC)
            token += count


@inner
def _few_tokens(
    weights_RK: Array,
    base: Index,
    start: Index,
    end: Index,
    inputs_TK: Array,
    token: Index,
    count: Index,
    outputs_TC: Array,
) -> None:
    # The number of tokens must be a literal: it is the number of registers.
    for row in range(start, end):
        if count == 1:
            dot_tile(1, 1, AHEAD, weights_RK, base + row, inputs_TK, token, outputs_TC, row)
        elif count == 2:
            dot_tile(1, 2, AHEAD, weights_RK, base + row, inputs_TK, token, outputs_TC, row)
        elif count == 3:
            dot_tile(1, 3, AHEAD, weights_RK, base + row, inputs_TK, token, outputs_TC, row)
        elif count == 4:
            dot_tile(1, 4, AHEAD, weights_RK, base + row, inputs_TK, token, outputs_TC, row)
        elif count == 5:
            dot_tile(1, 5, AHEAD, weights_RK, base + row, inputs_TK, token, outputs_TC, row)
        else:
            dot_tile(1, 6, AHEAD, weights_RK, base + row, inputs_TK, token, outputs_TC, row)


@inner
def _stream_tokens(
    weights_RK: Array,
    base: Index,
    start: Index,
    end: Index,
    inputs_TK: Array,
    first: Index,
    last: Index,
    outputs_TC: Array,
) -> None:
    num_k = inputs_TK.shape[1]
    num_rows = max(4, NUMBERS_IN_PANEL // max(num_k, 1) // 4 * 4)
    num_tokens = max(MANY_TOKENS, NUMBERS_IN_CHUNK // max(num_k, 1))
    panel_RK = np.empty((num_rows, num_k), np.float32)
    for chunk in range(first, last, num_tokens):
        chunk_end = min(chunk + num_tokens, last)
        for block in range(start, end, num_rows):
            count = min(num_rows, end - block)
            for row in range(count):
                widen_row(weights_RK[base + block + row], panel_RK[row])
            _past_panel(panel_RK, count, inputs_TK, chunk, chunk_end, outputs_TC, block)


@inner
def _past_panel(
    panel_RK: Array,
    num_rows: Index,
    inputs_TK: Array,
    first: Index,
    last: Index,
    outputs_TC: Array,
    column: Index,
) -> None:
    """outputs[first:last, column : column + num_rows] by the panel's first rows."""
    fours = num_rows // 4 * 4
    token: Index = first
    while token + 3 <= last:
        for row in range(0, fours, 4):
            dot_tile(4, 3, 0, panel_RK, row, inputs_TK, token, outputs_TC, column + row)
        for row in range(fours, num_rows):
            dot_tile(1, 3, 0, panel_RK, row, inputs_TK, token, outputs_TC, column + row)
        token += 3
    while token < last:
        for row in range(num_rows):
            dot_tile(1, 1, 0, panel_RK, row, inputs_TK, token, outputs_TC, column + row)
        token += 1


@compiled
def round_rows(
    inputs_TK: Array, first: Index, last: Index, weights_RK: Array, rounded_TK: Array
) -> None:
    """Rows first:last rounded to what the weights store, as float32; in place, too."""
    size = inputs_TK.shape[1]
    whole = size // WIDTH * WIDTH
    for row in range(first, last):
        # Both may be some columns of an array.
        source, target = row * inputs_TK.strides[0], row * rounded_TK.strides[0]
        for k in range(0, whole, WIDTH):
            values = load(inputs_TK, source + in_bytes(k))
            store(rounded_TK, target + in_bytes(k), rounded_lanes(values, weights_RK))
        for k in range(whole, size):
            value = load_float(inputs_TK, source + in_bytes(k))
            store(rounded_TK, target + in_bytes(k), rounded(value, weights_RK))


@compiled
def narrow_row(row_K: Array, stored_K: Array) -> None:
    """Float32 as what is stored, the nearest."""
    for k in range(row_K.size):
        stored_K[k] = narrowed(row_K[k], stored_K)


@compiled
def widen_row(stored_K: Array, row_K: Array) -> None:
    """Stored numbers as float32."""
    for k in range(row_K.size):
        row_K[k] = widened(stored_K[k])
