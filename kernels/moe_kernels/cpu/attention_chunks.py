"""What a row of attention came to over several chunks of keys, joined in their order.

Of one chunk a row has its greatest score (top), the sum of its weights e^(score − top) (total) and
its values' sum by these weights. Two chunks are joined by taking both to the greater top. A row's
chunks are always joined one after the other from the first on, beginning with the sink: by the
thread that made them, or by `join_units` from what threads left, with the same additions.

Memory that is left: for each row of a unit a top, a total and V sums, chunk after chunk; those of
the first unit of a tile begin with the sink's.
Neighbours: `attention` makes chunks, `attention_work` gives their places.

Letters: P places for a row's chunk, V width of a value.
"""

# mypy: ignore-errors

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import types

from moe_kernels.cpu.attention_products import STEP, ZERO
from moe_kernels.cpu.attention_rows import NO_SCORE, ONE, put_rows
from moe_kernels.cpu.attention_work import (
    CHUNKS_END,
    FIRST_CHUNK,
    FIRST_HEAD,
    FIRST_PARTIAL,
    HEADS_END,
    KV_HEADS,
    NUM_QUERIES,
    PARTIAL,
)
from moe_kernels.cpu.jit import Array, inner
from moe_kernels.cpu.lanes import fma, load, multiply, splat, store


class Partials(NamedTuple):
    tops_P: Array
    totals_P: Array
    sums_P: Array
    """Bytes, V float32 a place."""


PARTIALS = types.NamedTuple(
    [types.Array(each, 1, "C") for each in (types.float32, types.float32, types.uint8)], Partials
)
"""Their type to kernels."""


def partials_for(num_places: int, value_width: int) -> Partials:
    tops, totals = (np.empty(num_places, dtype=np.float32) for _ in range(2))
    return Partials(tops, totals, np.empty(num_places * value_width * 4, dtype=np.uint8))


@inner
def begin_joining(tops, totals):
    """`tops` are the sinks, which have a weight of their own and no value."""
    for row in range(len(tops)):
        totals[row] = ZERO if tops[row] == NO_SCORE else ONE


@inner
def join(all_tops, all_totals, all_sums, tops, totals, sums):
    """Add a chunk of each row to what was before."""
    row_bytes = len(sums) // len(tops)
    for row in range(len(tops)):
        top = max(all_tops[row], tops[row])
        if tops[row] == NO_SCORE and totals[row] == ZERO:  # it sees nothing of this chunk
            continue
        if top == NO_SCORE:  # no number yet that counts
            all_totals[row] += totals[row]
            continue
        old = np.float32(math.exp(all_tops[row] - top))
        new = np.float32(math.exp(tops[row] - top))
        all_tops[row] = top
        all_totals[row] = np.float32(all_totals[row] * old) + np.float32(totals[row] * new)
        old_lanes, new_lanes = splat(old), splat(new)
        for byte in range(row * row_bytes, (row + 1) * row_bytes, STEP):
            kept = multiply(load(all_sums, np.int64(byte)), old_lanes)
            store(all_sums, np.int64(byte), fma(load(sums, np.int64(byte)), new_lanes, kept))


@inner
def keep_partial(partials, place, tops, totals, sums):
    count = len(tops)
    row_bytes = len(sums) // count
    partials.tops_P[place : place + count] = tops
    partials.totals_P[place : place + count] = totals
    partials.sums_P[place * row_bytes : (place + count) * row_bytes] = sums


@inner
def join_units(units, partials, out_THV):
    """Finish the tiles whose chunks were taken apart: those whose first unit left the sink's."""
    for index in range(len(units)):
        unit = units[index]
        if unit[FIRST_PARTIAL] >= 0 and unit[PARTIAL] == unit[FIRST_PARTIAL]:
            _join_tile(units, index, partials, out_THV)


@inner
def _join_tile(units, index, partials, out_THV):
    unit = units[index]
    first = unit[FIRST_PARTIAL]
    count = _num_rows(unit, out_THV)
    row_bytes = out_THV.shape[2] * 4
    tops, totals, sums = _kept(partials, first, count, row_bytes)
    place = first + count
    while index < len(units) and units[index, FIRST_PARTIAL] == first:
        for _ in range(units[index, FIRST_CHUNK], units[index, CHUNKS_END]):
            more_tops, more_totals, more_sums = _kept(partials, place, count, row_bytes)
            join(tops, totals, sums, more_tops, more_totals, more_sums)
            place += count
        index += 1
    put_rows(unit, totals, sums, out_THV)


@inner
def _kept(partials, place, count, row_bytes):
    return (
        partials.tops_P[place : place + count],
        partials.totals_P[place : place + count],
        partials.sums_P[place * row_bytes : (place + count) * row_bytes],
    )


@inner
def _num_rows(unit, out_THV):
    group = out_THV.shape[1] // unit[KV_HEADS]
    return (unit[HEADS_END] - unit[FIRST_HEAD]) * unit[NUM_QUERIES] * group
