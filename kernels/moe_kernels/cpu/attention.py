"""Causal attention over paged keys and values with numba: decode, prefill and any mix of them.

The unit of work is a tile (some queries of one sequence, with all query heads that share a kv
head), a range of kv heads and a range of chunks; a thread runs units, one after the other, without
another's help. A chunk is CHUNK_TOKENS keys that begin at a multiple of it:
  1. scores of the tile's rows with the chunk's keys, block by block in order of position;
  2. softmax of each row over the keys that it sees there, in lanes counted from its first;
  3. values added by weight, block by block, token by token;
  4. what came out is joined to the row's chunks before, see `attention_chunks`.
A row's numbers are then those of its own keys in order of position: neither the tile's other rows,
the chunk of the prompt, the batch, the threads, the blocks' places nor their size have a part in
them. A token that a row does not see is not multiplied by zero but left out, so whatever its block
holds cannot reach the row. NaN among what a row sees gives NaN.

A chunk's scores stay in the cache, however long the context. Of a single query of a long context,
threads may take chunks apart, where kv heads alone would leave some idle: then each leaves what
its chunks came to, and `join_units` joins them in the order in which one thread would have.
Neighbours: `attention_work` cuts the units, `kv_codes` decodes a block, `attention_products`
multiplies (`attention_stored` for few rows), `attention_rows` has the softmax,
`moe_kernels.paged_attention` has the contract.

Letters: T tokens, H query heads, N kv heads, G query heads per kv head, D width of a key, V of a
value, U units, P partial results.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from numba import types

from moe_kernels.cpu.apart import Slot, call_apart
from moe_kernels.cpu.attention_chunks import (
    PARTIALS,
    Partials,
    begin_joining,
    join,
    join_units,
    keep_partial,
)
from moe_kernels.cpu.attention_products import STEP, mix_block, score_block
from moe_kernels.cpu.attention_rows import first_key, put_rows, soften, take_queries
from moe_kernels.cpu.attention_stored import mix_stored, multiplies_stored, score_stored
from moe_kernels.cpu.attention_work import (
    CHUNK_TOKENS,
    CHUNKS_END,
    FIRST_CHUNK,
    FIRST_HEAD,
    FIRST_PARTIAL,
    HEADS_END,
    KV_HEADS,
    NUM_QUERIES,
    PARTIAL,
    POSITION,
    TABLE_START,
)
from moe_kernels.cpu.jit import Array, compiled, inner
from moe_kernels.cpu.kv_codes import (
    FP32,
    STORED_SIDE,
    VECTOR_WIDTH,
    StoredSide,
    decode_block,
    prefetch_block,
    rows_of,
    side_at,
)
from moe_kernels.cpu.lanes import address_of
from moe_kernels.cpu.parts import meet, new_board, take, take_next
from moe_kernels.cpu.team import together

PREFETCH_BLOCKS = 2


@compiled
def attend_all(
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
    partials: Partials,
    out_THV: Array,
) -> None:
    """`attend_range` by as many threads as `bounds` has ranges."""
    together(
        _walk, bounds.size - 1, new_board(1), q_THD, key, key_tail, value, units, bounds, tables,
        block_size, window, scale, sinks_H, center_ND, channel_ND, partials, out_THV,
    )  # fmt: skip
    if len(partials.tops_P):
        join_units(units, partials, out_THV)


@inner
def _walk(
    board, q_THD, key, key_tail, value, units, bounds, tables, block_size, window, scale, sinks_H,
    center_ND, channel_ND, partials, out_THV,
):  # fmt: skip
    parts = bounds.size - 1
    part = take(board, 0)
    while part < parts:
        attend_range(
            q_THD, key, key_tail, value, units, bounds[part], bounds[part + 1], tables, block_size,
            window, scale, sinks_H, center_ND, channel_ND, partials, out_THV,
        )  # fmt: skip
        part = take_next(board, 0)
    meet(board, 0, parts)


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
    partials: Partials,
    out_THV: Array,
) -> None:
    """Run units begin ≤ u < end. `window` 0 = all keys; empty sinks, center or channel = none.

    `ATTENDING.fill()` comes before the first call.
    """
    call_apart(
        "attend", q_THD, key, key_tail, value, units, begin, end, tables, block_size, window,
        scale, sinks_H, center_ND, channel_ND, partials, out_THV,
    )  # fmt: skip


def _attend(
    q_THD, key, key_tail, value, units, begin, end, tables, block_size, window, scale, sinks_H,
    center_ND, channel_ND, partials, out_THV,
):  # fmt: skip
    for unit in range(begin, end):
        _attend_unit(
            q_THD, key, key_tail, value, units[unit], tables, block_size, window, scale, sinks_H,
            center_ND, channel_ND, partials, out_THV,
        )  # fmt: skip


_NUMBERS_3, _NUMBERS_2, _NUMBERS_1 = (types.Array(types.float32, n, "C") for n in (3, 2, 1))
_UNITS, _TABLES = types.Array(types.int64, 2, "C"), types.Array(types.int64, 1, "C")
ATTENDING = Slot(
    "attend",
    _attend,
    [
        _NUMBERS_3,
        *[STORED_SIDE] * 3,
        _UNITS,
        *[types.int64] * 2,
        _TABLES,
        *[types.int64] * 2,
        types.float32,
        _NUMBERS_1,
        _NUMBERS_2,
        _NUMBERS_2,
        PARTIALS,
        _NUMBERS_3,
    ],
)


@inner
def _attend_unit(
    q_THD, key, key_tail, value, unit, tables, block_size, window, scale, sinks_H,
    center_ND, channel_ND, partials, out_THV,
):  # fmt: skip
    group = q_THD.shape[1] // unit[KV_HEADS]
    num_heads = unit[HEADS_END] - unit[FIRST_HEAD]
    num_rows = num_heads * unit[NUM_QUERIES] * group
    q_bytes, v_bytes = q_THD.shape[2] * 4, value.sizes[VECTOR_WIDTH] * 4
    score_bytes = CHUNK_TOKENS * 4 + STEP

    q = np.empty(num_rows * q_bytes, dtype=np.uint8)
    scores = np.empty(num_rows * score_bytes, dtype=np.uint8)
    decoded = np.empty(block_size * q_bytes, dtype=np.uint8)
    tops, totals = np.empty(num_rows, dtype=np.float32), np.empty(num_rows, dtype=np.float32)
    sums = np.empty(num_rows * v_bytes, dtype=np.uint8)
    all_tops, all_totals = np.empty_like(tops), np.zeros_like(totals)
    all_sums = np.zeros_like(sums)

    take_queries(q_THD, unit, group, scale, sinks_H, center_ND, channel_ND, q, all_tops)
    begin_joining(all_tops, all_totals)
    place = unit[PARTIAL]
    if unit[FIRST_PARTIAL] >= 0 and place == unit[FIRST_PARTIAL]:
        keep_partial(partials, place, all_tops, all_totals, all_sums)
        place += num_rows
    for chunk in range(unit[FIRST_CHUNK], unit[CHUNKS_END]):
        sums[:] = 0
        _attend_chunk(
            key, key_tail, value, unit, chunk * CHUNK_TOKENS, tables, block_size, window, group,
            q, q_bytes, scores, score_bytes, decoded, tops, totals, sums, v_bytes,
        )  # fmt: skip
        if unit[FIRST_PARTIAL] < 0:
            join(all_tops, all_totals, all_sums, tops, totals, sums)
        else:
            keep_partial(partials, place, tops, totals, sums)
            place += num_rows
    if unit[FIRST_PARTIAL] < 0:
        put_rows(unit, all_totals, all_sums, out_THV)


@inner
def _attend_chunk(
    key_side, tail_side, value_side, unit, start, tables, block_size, window, group,
    q_rows, q_bytes, score_rows, score_bytes, scratch, tops, totals, sum_rows, v_bytes,
):  # fmt: skip
    """A row's greatest score, its weights' sum and their sum of values; none where it sees none."""
    # The caller holds the arrays.
    key, key_tail, value = side_at(key_side), side_at(tail_side), side_at(value_side)
    q, scores, decoded = address_of(q_rows), address_of(score_rows), address_of(scratch)
    sums = address_of(sum_rows)
    position, num_queries = unit[POSITION], unit[NUM_QUERIES]
    first_head, table_start = unit[FIRST_HEAD], unit[TABLE_START]
    num_heads, rows = unit[HEADS_END] - first_head, num_queries * group
    end = min(start + CHUNK_TOKENS, position + num_queries)
    seen_from = first_key(position, window)
    first_block = max(seen_from, start) // block_size
    end_block = (end - 1) // block_size + 1
    origin = first_block * block_size
    other_row = rows - 1  # 1 or 0, of the two rows at most that a kv head has where `stored`

    stored = rows == group and key_tail.width == 0 and multiplies_stored(key, rows)
    in_place = key.code == FP32 and key_tail.width == 0
    for place in range(first_block, end_block):
        block = tables[table_start + place]
        ahead = tables[table_start + min(place + PREFETCH_BLOCKS, end_block - 1)]
        to = scores + (place * block_size - origin) * 4
        if stored:
            score_stored(
                key, block, ahead, first_head, num_heads, block_size, q, rows * q_bytes,
                other_row * q_bytes, to, rows * score_bytes, other_row * score_bytes,
            )  # fmt: skip
            continue
        for head in range(num_heads):
            prefetch_block(key, ahead, first_head + head)
            keys = decoded
            if in_place:
                keys = rows_of(key, block, first_head + head)
            else:
                decode_block(key, block, first_head + head, block_size, decoded, q_bytes)
            if key_tail.width:
                behind = decoded + key.width * 4
                decode_block(key_tail, block, first_head + head, block_size, behind, q_bytes)
            score_block(
                q + head * rows * q_bytes, rows, keys, block_size, q_bytes,
                to + head * rows * score_bytes, score_bytes,
            )  # fmt: skip

    # The first values come while the scores become weights.
    for place in range(first_block, min(first_block + PREFETCH_BLOCKS, end_block)):
        for head in range(num_heads):
            prefetch_block(value, tables[table_start + place], first_head + head)
    for row in range(num_heads * rows):
        query = position + row % rows // group
        seen = max(first_key(query, window), start)
        tops[row], totals[row] = soften(
            scores + row * score_bytes + (seen - origin) * 4, min(query + 1, end) - seen
        )

    # Between these all queries of the tile see every key.
    full_from = first_key(position + num_queries - 1, window)
    full_to = position + 1
    stored = rows == group and multiplies_stored(value, rows)
    for place in range(first_block, end_block):
        block, begin = tables[table_start + place], place * block_size
        ahead = tables[table_start + min(place + PREFETCH_BLOCKS, end_block - 1)]
        weights = scores + (begin - origin) * 4
        if stored:
            low, high = max(seen_from - begin, 0), min(end - begin, block_size)
            mix_stored(
                value, block, ahead, first_head, num_heads, low, high - low, weights + low * 4,
                rows * score_bytes, other_row * score_bytes, sums, rows * v_bytes,
                other_row * v_bytes,
            )  # fmt: skip
            continue
        in_full = begin >= full_from and begin + block_size <= full_to
        at_once = num_queries if in_full else 1
        for head in range(num_heads):
            prefetch_block(value, ahead, first_head + head)
            values = decoded
            if value.code == FP32:
                values = rows_of(value, block, first_head + head)
            else:
                decode_block(value, block, first_head + head, block_size, decoded, v_bytes)
            for query in range(0, num_queries, at_once):
                low = max(first_key(position + query, window) - begin, 0)
                high = min(position + query + 1 - begin, block_size)
                row = head * rows + query * group
                mix_block(
                    weights + row * score_bytes + low * 4, score_bytes, at_once * group,
                    values + low * v_bytes, v_bytes, high - low, sums + row * v_bytes, v_bytes,
                )  # fmt: skip
