"""One step's attention cut into units of work, and the units into ranges of threads. No kernels.

A tile is some queries of one sequence, so many that with the query heads of a kv head they make
about ROWS_PER_TILE rows: what decoding a block costs is shared by them. A tile of several queries
takes one kv head (its rows fill the cache), a tile of one query takes several while there are
enough units for all threads, and where even single kv heads are too few, its chunks of keys are
taken apart. Ranges have about the same number of keys times rows; no result depends on where they
are cut.
Neighbours: `attention_plan` has the step's rows, `attention` runs the units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from moe_kernels.attention_plan import AttentionPlan

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
    tiles, tables = _tiles(plan, max(1, ROWS_PER_TILE // group))
    wanted = UNITS_PER_THREAD * num_threads
    heads = _heads_per_unit(num_kv_heads, len(tiles), wanted)
    pieces = [_split(tiles[tiles[:, NUM_QUERIES] == 1], num_kv_heads, heads)]
    pieces.append(_split(tiles[tiles[:, NUM_QUERIES] > 1], num_kv_heads, 1))
    units, num_partials = np.concatenate(pieces), 0
    if num_threads > 1 and 0 < len(units) < wanted:
        units, num_partials = _split_chunks(units, -(-wanted // len(units)), heads * group)
    bounds = _bounds(_costs(units, group, plan.window), num_threads)
    end_block = int(tables.max(initial=-1)) + 1
    return AttentionWork(units, bounds, tables, end_block, num_partials)


def _tiles(plan: AttentionPlan, queries_per_tile: int) -> tuple[Int64s, Int64s]:
    """Units of all kv heads, and the block tables. Raises IndexError when a table is too short."""
    table = plan.table
    tiles_S = -(-table.num_tokens_S // queries_per_tile)
    of_tile = np.repeat(np.arange(len(tiles_S)), tiles_S)
    within = np.arange(len(of_tile)) - np.repeat(np.cumsum(tiles_S) - tiles_S, tiles_S)
    begins = within * queries_per_tile
    tiles = np.zeros((len(of_tile), KV_HEADS + 1), dtype=np.int64)
    tiles[:, ROW] = table.first_row_S[of_tile] + begins
    tiles[:, POSITION] = table.start_S[of_tile] + begins
    tiles[:, NUM_QUERIES] = np.minimum(queries_per_tile, table.num_tokens_S[of_tile] - begins)
    tiles[:, TABLE_START] = table.first_block_S[of_tile]
    tiles[:, FIRST_CHUNK] = _first_keys(tiles, plan.window) // CHUNK_TOKENS
    tiles[:, CHUNKS_END] = -(-(tiles[:, POSITION] + tiles[:, NUM_QUERIES]) // CHUNK_TOKENS)
    tiles[:, FIRST_PARTIAL] = tiles[:, PARTIAL] = -1
    return tiles, table.blocks


def _heads_per_unit(num_kv_heads: int, num_tiles: int, wanted_units: int) -> int:
    """The most heads, a divisor of their number, that leave as many units as are wanted."""
    fitting = [
        heads
        for heads in range(1, num_kv_heads + 1)
        if num_kv_heads % heads == 0 and num_tiles * (num_kv_heads // heads) >= wanted_units
    ]
    return max(fitting, default=1)


def _split(tiles: Int64s, num_kv_heads: int, heads_per_unit: int) -> Int64s:
    """A unit of each tile and range of heads, a tile's units side by side."""
    firsts = np.arange(0, num_kv_heads, heads_per_unit, dtype=np.int64)
    units = np.repeat(tiles, len(firsts), axis=0)
    units[:, FIRST_HEAD] = np.tile(firsts, len(tiles))
    units[:, HEADS_END] = units[:, FIRST_HEAD] + heads_per_unit
    units[:, KV_HEADS] = num_kv_heads
    return units


def _split_chunks(units: Int64s, num_pieces: int, rows: int) -> tuple[Int64s, int]:
    """Units of one query, of `rows` rows each, taken apart into up to so many; and the places for
    what each row's chunks come to, the sink first."""
    pieces: list[Int64s] = []
    num_partials = 0
    for unit in units:
        chunks = np.arange(unit[FIRST_CHUNK], unit[CHUNKS_END])
        if len(chunks) == 1 or unit[NUM_QUERIES] > 1:
            pieces.append(unit)
            continue
        first = num_partials
        for own in np.array_split(chunks, min(num_pieces, len(chunks))):
            piece = unit.copy()
            piece[FIRST_CHUNK], piece[CHUNKS_END] = own[0], own[-1] + 1
            piece[FIRST_PARTIAL], piece[PARTIAL] = first, num_partials
            pieces.append(piece)
            num_partials += rows * (len(own) + (num_partials == first))
    return np.stack(pieces), num_partials


def _first_keys(units: Int64s, window: int | None) -> Int64s:
    """The earliest key that a unit sees."""
    if window is None:
        return np.zeros(len(units), dtype=np.int64)
    return np.maximum(units[:, POSITION] - window + 1, 0)


def _costs(units: Int64s, group: int, window: int | None) -> Int64s:
    end = np.minimum(
        units[:, POSITION] + units[:, NUM_QUERIES], units[:, CHUNKS_END] * CHUNK_TOKENS
    )
    keys = end - np.maximum(_first_keys(units, window), units[:, FIRST_CHUNK] * CHUNK_TOKENS)
    heads = units[:, HEADS_END] - units[:, FIRST_HEAD]
    costs: Int64s = keys * heads * (units[:, NUM_QUERIES] * group + DECODE_ROWS)
    return costs


def _bounds(costs: Int64s, num_threads: int) -> Int64s:
    """Ranges of units, in order, that cost about the same."""
    done = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(costs)))
    shares = done[-1] * np.arange(num_threads + 1) / num_threads
    bounds: Int64s = np.searchsorted(done, shares).astype(np.int64)
    bounds[-1] = len(costs)
    return bounds
