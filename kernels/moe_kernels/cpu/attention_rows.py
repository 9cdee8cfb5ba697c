"""The rows of a unit of attention: its queries as they meet keys, their softmax, their results.

Rows are by kv head, query and query head of that kv head.
Neighbours: `attention` runs a unit, `attention_chunks` joins what rows came to.

Letters: T tokens, H query heads, N kv heads, D width of a key, V of a value.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from moe_kernels.cpu.attention_products import STEP, ZERO
from moe_kernels.cpu.attention_work import FIRST_HEAD, KV_HEADS, NUM_QUERIES, ROW
from moe_kernels.cpu.jit import inner
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
ONE = np.float32(1.0)


@inner
def first_key(position, window):
    return max(position - window + 1, 0) if window else 0


@inner
def take_queries(q_THD, unit, group, scale, sinks_H, center_ND, channel_ND, q, logits):
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
def soften(scores, count):
    """Turn `count` scores into e^(score − top); their top and their sum."""
    if count <= 0:
        return NO_SCORE, ZERO
    num_bytes = count * 4
    # The last eight may reach past the keys that are seen: nothing is read there later.
    store(scores, num_bytes, splat(NO_SCORE))
    tops = splat(NO_SCORE)
    for byte in range(0, num_bytes, STEP):
        tops = maximum(load(scores, byte), tops)
    top = largest_of(tops)
    # Of keys that are all infinitely far no weight is a number but 0.
    shift = splat(-top if top != NO_SCORE else ZERO)
    total = splat(ZERO)
    for byte in range(0, num_bytes, STEP):
        weight = exp_nonpositive(add(load(scores, byte), shift))
        store(scores, byte, weight)
        total = add(total, weight)
    return top, sum_of(total)


@inner
def put_rows(unit, totals, sums, out_THV):
    """Rows are by kv head, query and query head."""
    group = out_THV.shape[1] // unit[KV_HEADS]
    rows, width = unit[NUM_QUERIES] * group, out_THV.shape[2]
    for row in range(len(totals)):
        query, head = row % rows // group, unit[FIRST_HEAD] + row // rows
        share = ONE / totals[row]
        out = out_THV[unit[ROW] + query, head * group + row % group]
        for element in range(width):
            out[element] = load_float(sums, np.int64((row * width + element) * 4)) * share
