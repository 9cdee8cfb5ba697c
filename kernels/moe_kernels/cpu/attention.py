"""Causal attention over paged keys and values with numba: decode, prefill and any mix of them.

The unit of work is a tile (some queries of one sequence, with all query heads that share a kv head)
and a range of kv heads; a thread runs units, one after the other, without another's help:
  1. scores of the tile's rows with every key, block by block in order of position;
  2. softmax of each row over the keys that it sees, in lanes counted from its first key;
  3. values added by weight, block by block, token by token.
A row's numbers are then those of its own keys in order of position: neither the tile's other rows,
the chunk, the batch, the blocks' places nor their size have a part in them. A token that a row does
not see is not multiplied by zero but left out, so whatever its block holds cannot reach the row.
NaN among what a row sees gives NaN.

Scores of all keys lie in scratch, 4 bytes per row and key: simpler than a running maximum, and no
number is rescaled. A tile of one query takes as many kv heads as the number of threads allows,
because the heads of a block are neighbours in memory.
Neighbours: `attention_work` cuts the units, `kv_codes` decodes a block, `attention_products`
multiplies, `moe_kernels.paged_attention` has the contract.

Letters: T tokens, H query heads, N kv heads, G query heads per kv head, D width of a key, V of a
value, U units.
"""

# mypy: ignore-errors

from __future__ import annotations

import math

import numpy as np
from numba import prange

from moe_kernels.cpu.attention_products import STEP, ZERO, mix_block, score_block
from moe_kernels.cpu.attention_work import (
    FIRST_HEAD,
    HEADS_END,
    NUM_QUERIES,
    POSITION,
    ROW,
    TABLE_START,
)
from moe_kernels.cpu.jit import Array, compiled, inner, parallel
from moe_kernels.cpu.kv_codes import (
    CODE,
    FP32,
    VECTOR_WIDTH,
    StoredSide,
    decode_block,
    head_at,
    prefetch_block,
)
from moe_kernels.cpu.lanes import (
    add,
    exp_nonpositive,
    largest_of,
    load,
    load_float,
    maximum,
    splat,
    store,
    sum_of,
)

NO_SCORE = np.float32(-np.inf)
PREFETCH_BLOCKS = 2


@parallel
def attend_parallel(
    q_THD: Array,
    key: StoredSide,
    key_tail: StoredSide,
    value: StoredSide,
    units: Array,
    bounds: Array,
    tables: Array,
    block_size: int,
    window: int,
    scale: np.float32,
    sinks_H: Array,
    center_ND: Array,
    channel_ND: Array,
    out_THV: Array,
) -> None:
    """`attend_range` by as many threads as `bounds` has ranges."""
    for thread in prange(len(bounds) - 1):
        attend_range(
            q_THD, key, key_tail, value, units, bounds[np.int64(thread)],
            bounds[np.int64(thread) + 1], tables, block_size, window, scale, sinks_H, center_ND,
            channel_ND, out_THV,
        )  # fmt: skip


@compiled
def attend_range(
    q_THD: Array,
    key: StoredSide,
    key_tail: StoredSide,
    value: StoredSide,
    units: Array,
    begin: int,
    end: int,
    tables: Array,
    block_size: int,
    window: int,
    scale: np.float32,
    sinks_H: Array,
    center_ND: Array,
    channel_ND: Array,
    out_THV: Array,
) -> None:
    """Run units begin ≤ u < end. `window` 0 = all keys; empty sinks, center or channel = none."""
    for unit in range(begin, end):
        _attend_unit(
            q_THD, key, key_tail, value, units[unit], tables, block_size, window, scale, sinks_H,
            center_ND, channel_ND, out_THV,
        )  # fmt: skip


@inner
def _attend_unit(
    q_THD, key, key_tail, value, unit, tables, block_size, window, scale, sinks_H,
    center_ND, channel_ND, out_THV,
):  # fmt: skip
    group = q_THD.shape[1] // unit_heads(q_THD, unit)
    position, num_queries = unit[POSITION], unit[NUM_QUERIES]
    first_head, num_heads = unit[FIRST_HEAD], unit[HEADS_END] - unit[FIRST_HEAD]
    rows = num_queries * group
    q_bytes, v_bytes = q_THD.shape[2] * 4, value.sizes[VECTOR_WIDTH] * 4

    first_block = first_key(position, window) // block_size
    end_block = (position + num_queries - 1) // block_size + 1
    origin = first_block * block_size
    score_bytes = (end_block * block_size - origin) * 4 + STEP

    q = np.empty(num_heads * rows * q_bytes, dtype=np.uint8)
    logits = np.empty(num_heads * rows, dtype=np.float32)
    scores = np.empty(num_heads * rows * score_bytes, dtype=np.uint8)
    sums = np.zeros(num_heads * rows * v_bytes, dtype=np.uint8)
    decoded = np.empty(block_size * q_bytes, dtype=np.uint8)

    _take_queries(q_THD, unit, group, num_heads, scale, sinks_H, center_ND, channel_ND, q, logits)
    table_start = unit[TABLE_START]
    in_place = key.sizes[CODE] == FP32 and key_tail.sizes[VECTOR_WIDTH] == 0
    for place in range(first_block, end_block):
        block = tables[table_start + place]
        ahead = tables[table_start + min(place + PREFETCH_BLOCKS, end_block - 1)]
        for head in range(num_heads):
            prefetch_block(key, ahead, first_head + head)
            q_at = head * rows * q_bytes
            to = head * rows * score_bytes + (place * block_size - origin) * 4
            if in_place:
                at = head_at(key, block, first_head + head)
                score_block(
                    q, q_at, rows, key.data, at, block_size, q_bytes, scores, to, score_bytes
                )
                continue
            decode_block(key, block, first_head + head, block_size, decoded, 0, q_bytes)
            if key_tail.sizes[VECTOR_WIDTH]:
                decode_block(
                    key_tail,
                    block,
                    first_head + head,
                    block_size,
                    decoded,
                    key.sizes[VECTOR_WIDTH] * 4,
                    q_bytes,
                )
            score_block(q, q_at, rows, decoded, 0, block_size, q_bytes, scores, to, score_bytes)

    for row in range(num_heads * rows):
        query = position + row % rows // group
        seen = first_key(query, window) - origin
        logits[row] = _soften(
            scores, row * score_bytes + seen * 4, query + 1 - origin - seen, logits[row]
        )

    # From the first to the last query of the tile, these blocks are seen in full.
    full_from = first_key(position + num_queries - 1, window)
    full_to = position + 1
    for place in range(first_block, end_block):
        block, begin = tables[table_start + place], place * block_size
        ahead = tables[table_start + min(place + PREFETCH_BLOCKS, end_block - 1)]
        for head in range(num_heads):
            prefetch_block(value, ahead, first_head + head)
            decode_block(value, block, first_head + head, block_size, decoded, 0, v_bytes)
            weights_at = head * rows * score_bytes + (begin - origin) * 4
            if begin >= full_from and begin + block_size <= full_to:
                mix_block(
                    scores, weights_at, score_bytes, rows, decoded, 0, v_bytes, block_size,
                    sums, head * rows * v_bytes, v_bytes,
                )  # fmt: skip
                continue
            for query in range(num_queries):
                low = max(first_key(position + query, window) - begin, 0)
                high = min(position + query + 1 - begin, block_size)
                mix_block(
                    scores, weights_at + query * group * score_bytes + low * 4, score_bytes, group,
                    decoded, low * v_bytes, v_bytes, high - low,
                    sums, (head * rows + query * group) * v_bytes, v_bytes,
                )  # fmt: skip

    for row in range(num_heads * rows):
        query, head = row % rows // group, first_head + row // rows
        share = np.float32(1.0) / logits[row]
        out = out_THV[unit[ROW] + query, head * group + row % group]
        for element in range(value.sizes[VECTOR_WIDTH]):
            out[element] = load_float(sums, np.int64(row * v_bytes + element * 4)) * share


@inner
def unit_heads(q_THD, unit):
    """Number of kv heads, which every unit carries behind its own columns."""
    return unit[-1]


@inner
def first_key(position, window):
    return max(position - window + 1, 0) if window else 0


@inner
def _take_queries(q_THD, unit, group, num_heads, scale, sinks_H, center_ND, channel_ND, q, logits):
    """The unit's queries, scaled, as rows by kv head, query and query head; and the sinks' logits.

    What a center took from every key is missing in all of a query's scores: so it is taken from
    the sink too, which they are compared with.
    """
    num_queries = unit[NUM_QUERIES]
    width = q_THD.shape[2]
    rows_ND = q.view(np.float32)
    for row in range(len(logits)):
        query, head = row % (num_queries * group) // group, row // (num_queries * group)
        kv_head = unit[FIRST_HEAD] + head
        source = q_THD[unit[ROW] + query, kv_head * group + row % group]
        taken = rows_ND[row * width : (row + 1) * width]
        for element in range(width):
            taken[element] = source[element] * scale
        logits[row] = NO_SCORE
        if len(sinks_H):
            logits[row] = sinks_H[kv_head * group + row % group]
            if len(center_ND):
                missing = ZERO
                for element in range(width):
                    missing += taken[element] * center_ND[kv_head, element]
                logits[row] -= missing
        if len(channel_ND):
            for element in range(width):
                taken[element] *= channel_ND[kv_head, element]


@inner
def _soften(scores, at, count, sink):
    """Turn `count` scores into e^(score − top) and give their sum, with the sink's part."""
    end = at + count * 4
    # The last eight may reach past the keys that are seen: nothing is read there later.
    store(scores, np.int64(end), splat(NO_SCORE))
    tops = splat(sink)
    for byte in range(at, end, STEP):
        tops = maximum(load(scores, np.int64(byte)), tops)
    top = largest_of(tops)
    shift = splat(-top)
    total = splat(ZERO)
    for byte in range(at, end, STEP):
        weight = exp_nonpositive(add(load(scores, np.int64(byte)), shift))
        store(scores, np.int64(byte), weight)
        total = add(total, weight)
    if sink == NO_SCORE:
        return sum_of(total)
    return sum_of(total) + np.float32(math.exp(sink - top))
