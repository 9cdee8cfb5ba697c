"""Rows of a matrix product over weight rows that stream from memory.

A decode step is limited by reading weights, so every weight row is read from memory once: rows go
by in blocks that stay in the cache, and each block meets all tokens, a few at a time, before the
next is read. One weight row at a time: two or more streams at once halve the bandwidth.
Neighbours: `intrinsics.dot_rows` is the inner loop and fixes the order of additions; `linear` and
`grouped_gemm` cut output rows among threads and call this.

Letters: T tokens, K inputs, R rows of all matrices one below the other, C outputs of one matrix.
"""

from __future__ import annotations

from moe_kernels.cpu.intrinsics import MOST_TOKENS, dot_rows, rounded
from moe_kernels.cpu.jit import Array, Index, compiled

ROWS_IN_CACHE = 32
TOKENS_IN_CACHE = 96
"""More than a decode step has; a long prefill reads the weights once for so many."""


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
    """outputs[first:last, start:end] = inputs[first:last] · weights[base + start : base + end]ᵀ."""
    for chunk in range(first, last, TOKENS_IN_CACHE):
        chunk_end = min(chunk + TOKENS_IN_CACHE, last)
        for block in range(start, end, ROWS_IN_CACHE):
            block_end = min(block + ROWS_IN_CACHE, end)
            token: Index = chunk
            while token < chunk_end:
                tiles = (chunk_end - token + MOST_TOKENS - 1) // MOST_TOKENS
                count = (chunk_end - token + tiles - 1) // tiles
                _tile(weights_RK, base, block, block_end, inputs_TK, token, count, outputs_TC)
                token += count


@compiled
def _tile(
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
    if count == 1:
        for row in range(start, end):
            dot_rows(1, weights_RK, base + row, inputs_TK, token, outputs_TC, row)
    elif count == 2:
        for row in range(start, end):
            dot_rows(2, weights_RK, base + row, inputs_TK, token, outputs_TC, row)
    elif count == 3:
        for row in range(start, end):
            dot_rows(3, weights_RK, base + row, inputs_TK, token, outputs_TC, row)
    elif count == 4:
        for row in range(start, end):
            dot_rows(4, weights_RK, base + row, inputs_TK, token, outputs_TC, row)
    elif count == 5:
        for row in range(start, end):
            dot_rows(5, weights_RK, base + row, inputs_TK, token, outputs_TC, row)
    else:
        for row in range(start, end):
            dot_rows(6, weights_RK, base + row, inputs_TK, token, outputs_TC, row)


@compiled
def round_rows(
    inputs_TK: Array, first: Index, last: Index, weights_RK: Array, rounded_TK: Array
) -> None:
    """Rows first:last rounded to what the weights store, as float32."""
    for row in range(first, last):
        source, target = inputs_TK[row], rounded_TK[row]
        for k in range(source.size):
            target[k] = rounded(source[k], weights_RK)
