"""One step's attention cut into units of work, and the units into ranges of threads.

A tile is some queries of one sequence, so many that with the query heads of a kv head they make
about ROWS_PER_TILE rows: what decoding a block costs is shared by them. A tile of several queries
takes one kv head (its rows fill the cache), a tile of one query takes several while there are
enough units for all threads, and where even single kv heads are too few, its chunks of keys are
taken apart. Ranges have about the same number of keys times rows; no result depends on where they
are cut. It is compiled because a step of one token would notice forty calls of numpy.
Neighbours: `attention_plan` has the step's rows, `attention` runs the units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from moe_kernels.attention_plan import AttentionPlan
from moe_kernels.cpu.jit import Array, Index, compiled

ROWS_PER_TILE = 32
DECODE_ROWS = 12
"""Decoding a block costs about as much as multiplying so many rows with it."""
UNITS_PER_THREAD = 2
CHUNK_TOKENS = 512
"""Keys whose scores are made before their values are read: those of a tile's rows stay in the
second-level cache. Results depend on it."""

ROW, POSITION, NUM_QUERIES, FIRST_HEAD, HEADS_END, TABLE_START = range(6)
FIRST_CHUNK, CHUNKS_END, FIRST_PARTIAL, PARTIAL, KV_HEADS = range(6, 11)
"""Columns of a unit: its first row of q, that row's position, its queries, its kv heads, where its
sequence's block table starts; its chunks of keys; where its tile's and its own partial results
begin, −1 for a tile that is one unit; and the layer's number of kv heads."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AttentionWork:
    units: Int64s
    bounds: Int64s
    """Thread i runs units bounds[i] ≤ u < bounds[i + 1]."""
    tables: Int64s
    """Block tables of all sequences, one after the other."""
    end_block: int
    """One more than the largest of their blocks."""
    num_partials: int
    """Places for a row's partial result, see `attention_chunks`."""


def attention_work(
    plan: AttentionPlan, num_kv_heads: int, group: int, num_threads: int
) -> AttentionWork:
    """Made once of a plan for all layers that are alike."""
    return plan.derived.get(
        ("cpu", num_kv_heads, group, num_threads),
        partial(_cut, plan, num_kv_heads, group, num_threads),
    )


def _cut(plan: AttentionPlan, num_kv_heads: int, group: int, num_threads: int) -> AttentionWork:
    table = plan.table
    units, bounds, num_partials = cut_units(
        table.start_S,
        table.num_tokens_S,
        table.first_row_S,
        table.first_block_S,
        num_kv_heads,
        group,
        plan.window or 0,
        num_threads,
    )
    end_block = int(table.blocks.max(initial=-1)) + 1
    return AttentionWork(units, bounds, table.blocks, end_block, int(num_partials))


@compiled
def cut_units(
    start_S: Array,
    num_tokens_S: Array,
    first_row_S: Array,
    first_block_S: Array,
    kv_heads: int,
    group: int,
    window: int,
    threads: int,
) -> tuple[Array, Array, Index]:
    """Units, ranges of threads and the number of places; `window` 0 = all keys."""
    per_tile = max(1, ROWS_PER_TILE // group)
    num_single, num_wide = _count_tiles(num_tokens_S, per_tile)
    wanted = UNITS_PER_THREAD * threads
    heads = _heads_per_unit(kv_heads, num_single + num_wide, wanted)
    num_units = num_single * (kv_heads // heads) + num_wide * kv_heads
    pieces: Index = 1
    if threads > 1 and 0 < num_units < wanted:
        pieces = -(-wanted // num_units)
    units = np.empty((num_units * pieces, KV_HEADS + 1), np.int64)
    count: Index = 0
    num_partials: Index = 0
    for is_wide in range(2):
        for seq in range(num_tokens_S.size):
            for begin in range(0, num_tokens_S[seq], per_tile):
                queries = min(per_tile, num_tokens_S[seq] - begin)
                if is_wide != (queries > 1):
                    continue
                for head in range(0, kv_heads, 1 if is_wide else heads):
                    unit = units[count]
                    unit[ROW], unit[POSITION] = first_row_S[seq] + begin, start_S[seq] + begin
                    unit[NUM_QUERIES], unit[TABLE_START] = queries, first_block_S[seq]
                    unit[FIRST_HEAD], unit[HEADS_END] = head, head + (1 if is_wide else heads)
                    unit[KV_HEADS] = kv_heads
                    unit[FIRST_CHUNK] = _first_key(unit[POSITION], window) // CHUNK_TOKENS
                    unit[CHUNKS_END] = -(-(unit[POSITION] + queries) // CHUNK_TOKENS)
                    unit[FIRST_PARTIAL] = unit[PARTIAL] = -1
                    made: Index = 1
                    places: Index = 0
                    if not is_wide:
                        rows = heads * group
                        made, places = _split_chunks(units, count, pieces, rows, num_partials)
                    count += made
                    num_partials += places
    return units[:count], _bounds(units[:count], group, window, threads), num_partials


@compiled
def _count_tiles(num_tokens_S: Array, per_tile: Index) -> tuple[Index, Index]:
    """Of one query, and of several."""
    single = wide = 0
    for num_tokens in num_tokens_S:
        rest = num_tokens % per_tile
        wide += num_tokens // per_tile if per_tile > 1 else 0
        single += 0 if per_tile > 1 else num_tokens
        wide += rest > 1
        single += rest == 1
    return single, wide


@compiled
def _heads_per_unit(kv_heads: Index, num_tiles: Index, wanted: Index) -> Index:
    """The most heads, a divisor of their number, that leave as many units as are wanted."""
    most = 1
    for heads in range(2, kv_heads + 1):
        if kv_heads % heads == 0 and num_tiles * (kv_heads // heads) >= wanted:
            most = heads
    return most


@compiled
def _split_chunks(
    units: Array, at: Index, pieces: Index, rows: Index, num_partials: Index
) -> tuple[Index, Index]:
    """Take the unit of `rows` rows apart into up to so many, which come in its place; how many
    there are, and places for what each row's chunks come to, the sink first."""
    first_chunk, end = units[at, FIRST_CHUNK], units[at, CHUNKS_END]
    made = min(pieces, end - first_chunk)
    if made < 2:
        return 1, 0
    places = 0
    for piece in range(made):
        unit = units[at + piece]
        unit[:] = units[at]
        num_chunks = (end - first_chunk) // made + (piece < (end - first_chunk) % made)
        unit[FIRST_CHUNK] = first_chunk if piece == 0 else units[at + piece - 1, CHUNKS_END]
        unit[CHUNKS_END] = unit[FIRST_CHUNK] + num_chunks
        unit[FIRST_PARTIAL], unit[PARTIAL] = num_partials, num_partials + places
        places += rows * (num_chunks + (piece == 0))
    return made, places


@compiled
def _first_key(position: Index, window: Index) -> Index:
    """The earliest key that a query there sees."""
    return max(position - window + 1, 0) if window > 0 else 0


@compiled
def _bounds(units: Array, group: Index, window: Index, threads: Index) -> Array:
    """Ranges of units, in order, that cost about the same."""
    done_U = np.zeros(units.shape[0] + 1, np.int64)
    for at in range(units.shape[0]):
        unit = units[at]
        end = min(unit[POSITION] + unit[NUM_QUERIES], unit[CHUNKS_END] * CHUNK_TOKENS)
        first = max(_first_key(unit[POSITION], window), unit[FIRST_CHUNK] * CHUNK_TOKENS)
        heads = unit[HEADS_END] - unit[FIRST_HEAD]
        cost = (end - first) * heads * (unit[NUM_QUERIES] * group + DECODE_ROWS)
        done_U[at + 1] = done_U[at] + cost
    bounds = np.empty(threads + 1, np.int64)
    at = 0
    for thread in range(threads):
        while done_U[at] * threads < done_U[-1] * thread:
            at += 1
        bounds[thread] = at
    bounds[threads] = units.shape[0]
    return bounds
