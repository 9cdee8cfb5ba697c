"""The order of work of one step's attention, decided once from plain integers for every layer.

The unit is a pair of a *tile* (TILE_TOKENS queries of one sequence) and a *span* (SPAN_TOKENS keys
of it). Pairs are run in passes that fit the processor's cache. Within a pass the longest tiles
come first: the tiles that reach span j are then a prefix for every j, and sums need no index.
Neighbours: `moe_worker.engine.batch` gives the rows, `paged_attention` runs the plan.

Letters: T tokens, U tiles, W TILE_TOKENS, P pairs, S spans, L SPAN_TOKENS, B blocks of a span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TILE_TOKENS = 4
SPAN_TOKENS = 64
PAIRS_PER_PRODUCT = 8
MAX_PAIRS_PER_PASS = 256
MAX_SPANS_PER_PASS = 64
"""Bound the scratch memory of a pass: scores of pairs, keys and values of spans. A single tile may
pass both."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AttentionRows:
    """One sequence's share of a step: queries at positions start ≤ p < start + num_tokens."""

    start: int
    num_tokens: int
    blocks: Sequence[int]
    """Its block table, at least up to the last query."""


@dataclass(frozen=True)
class AttentionPass:
    """Tiles [first_tile, first_tile + U), the longest first, and their pairs by span, then tile.

    P is filled up to a multiple of PAIRS_PER_PRODUCT with copies of the first pair, never used.
    """

    first_tile: int
    tiles_per_span: tuple[int, ...]
    """How many of the pass's tiles reach span 0, 1, …; not increasing."""
    span_blocks_SB: Tensor
    stale_places: tuple[Tensor, Tensor]
    """Span and place of every token that is read although it lies past its sequence's end."""
    pair_spans_P: Tensor
    pair_tiles_P: Tensor
    """Tile of each pair, counted within the pass."""
    unseen_PWL: Tensor
    """True where the key comes after the query."""
    distance_PWL: Tensor
    """Position of the query less the key's, int32."""
    _windowed: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def unseen(self, window: int | None) -> Tensor:
        """[P, W, L] bool: the keys that a query does not see when it sees `window` tokens back,
        itself included. Computed once for each window: all layers that have it share it."""
        if window is None:
            return self.unseen_PWL
        if window not in self._windowed:
            self._windowed[window] = self.unseen_PWL | (self.distance_PWL >= window)
        return self._windowed[window]


@dataclass(frozen=True)
class AttentionPlan:
    tile_rows_UW: Tensor
    """Row of q for each place of a tile; padding places point past the last row."""
    place_of_row_T: Tensor
    """Inverse of `tile_rows_UW`, flat."""
    passes: tuple[AttentionPass, ...]


def plan_attention(
    rows: Sequence[AttentionRows], block_size: int, device: str | torch.device = "cpu"
) -> AttentionPlan:
    """Plan a step whose tokens are those of `rows`, one sequence after another.

    `block_size` divides SPAN_TOKENS.
    """
    if SPAN_TOKENS % block_size:
        raise ValueError(f"block size {block_size} does not divide {SPAN_TOKENS}")
    tiles = _tiles(rows)
    ranges = _cut(tiles)
    for begin, end in ranges:
        part = tiles[begin:end]
        tiles[begin:end] = part[np.argsort(-part[:, _SPANS], kind="stable")]
    num_tokens = sum(row.num_tokens for row in rows)
    real_UW = _PLACES < tiles[:, _TOKENS, None]
    tile_rows_UW = np.where(real_UW, tiles[:, _ROW, None] + _PLACES, num_tokens)
    place_of_row_T = np.zeros(num_tokens, dtype=np.int64)
    place_of_row_T[tile_rows_UW[real_UW]] = np.flatnonzero(real_UW)
    return AttentionPlan(
        tile_rows_UW=torch.from_numpy(tile_rows_UW).to(device),
        place_of_row_T=torch.from_numpy(place_of_row_T).to(device),
        passes=tuple(
            _plan_pass(begin, tiles[begin:end], rows, block_size, device) for begin, end in ranges
        ),
    )


# Columns of the tile table.
_SEQUENCE, _ROW, _POSITION, _TOKENS, _SPANS = range(5)
_PLACES = np.arange(TILE_TOKENS)


def _tiles(rows: Sequence[AttentionRows]) -> Int64s:
    """A line per tile: sequence, first row of q, its position, tokens, spans it reaches."""
    tables = [np.empty((0, 5), dtype=np.int64)]
    first_row = 0
    for index, row in enumerate(rows):
        begins = np.arange(0, row.num_tokens, TILE_TOKENS, dtype=np.int64)
        tokens = np.minimum(TILE_TOKENS, row.num_tokens - begins)
        table = np.empty((len(begins), 5), dtype=np.int64)
        table[:, _SEQUENCE] = index
        table[:, _ROW] = first_row + begins
        table[:, _POSITION] = row.start + begins
        table[:, _TOKENS] = tokens
        table[:, _SPANS] = -(-(row.start + begins + tokens) // SPAN_TOKENS)
        tables.append(table)
        first_row += row.num_tokens
    return np.concatenate(tables)


def _cut(tiles: Int64s) -> list[tuple[int, int]]:
    """Ranges of tiles within the bounds of a pass, or of one tile. Tiles of a sequence are in order
    of position, so the spans it needs so far are its newest tile's."""
    ranges: list[tuple[int, int]] = []
    begin = pairs = spans = 0
    sequence, reach = -1, 0
    for tile, (owner, count) in enumerate(tiles[:, (_SEQUENCE, _SPANS)].tolist()):
        more = count - reach if owner == sequence else count
        too_many = pairs + count > MAX_PAIRS_PER_PASS or spans + more > MAX_SPANS_PER_PASS
        if too_many and tile > begin:
            ranges.append((begin, tile))
            begin, pairs, spans, more = tile, 0, 0, count
        pairs += count
        spans += more
        sequence, reach = owner, count
    return [*ranges, (begin, len(tiles))] if len(tiles) else []


def _plan_pass(
    first_tile: int,
    tiles: Int64s,
    rows: Sequence[AttentionRows],
    block_size: int,
    device: str | torch.device,
) -> AttentionPass:
    num_spans = tiles[:, _SPANS]
    tiles_per_span = [int((num_spans > span).sum()) for span in range(int(num_spans[0]))]
    pair_tiles = np.concatenate([np.arange(count) for count in tiles_per_span])
    span_of_pair = np.repeat(np.arange(len(tiles_per_span)), tiles_per_span)

    # A sequence's spans are read once per pass, up to the furthest that its tiles here reach.
    sequences, first_tiles = np.unique(tiles[:, _SEQUENCE], return_index=True)
    reach = num_spans[first_tiles]
    first_span = np.concatenate(([0], np.cumsum(reach)))
    span_blocks_SB = np.zeros((int(first_span[-1]), SPAN_TOKENS // block_size), dtype=np.int64)
    past_end_SL = np.zeros((int(first_span[-1]), SPAN_TOKENS), dtype=bool)
    for place, index in enumerate(sequences):
        own = slice(first_span[place], first_span[place + 1])
        blocks = span_blocks_SB[own].reshape(-1)
        table = rows[index].blocks[: len(blocks)]
        blocks[: len(table)] = table
        past_end_SL[own].reshape(-1)[rows[index].start + rows[index].num_tokens :] = True
    sequence_of_pair = np.searchsorted(sequences, tiles[pair_tiles, _SEQUENCE])
    pair_spans = first_span[sequence_of_pair] + span_of_pair

    keys_PL = span_of_pair[:, None] * SPAN_TOKENS + np.arange(SPAN_TOKENS)
    # A padding place asks for the first key: any real key keeps its numbers finite.
    real_UW = _PLACES < tiles[:, _TOKENS, None]
    queries_UW = np.where(real_UW, tiles[:, _POSITION, None] + _PLACES, 0)
    distance_PWL = queries_UW[pair_tiles][:, :, None] - keys_PL[:, None, :]

    filling = -len(pair_tiles) % PAIRS_PER_PRODUCT
    filled = np.concatenate((np.arange(len(pair_tiles)), np.zeros(filling, dtype=np.int64)))

    def tensor(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(device)

    spans, places = np.nonzero(past_end_SL)
    return AttentionPass(
        first_tile=first_tile,
        tiles_per_span=tuple(tiles_per_span),
        span_blocks_SB=tensor(span_blocks_SB),
        stale_places=(tensor(spans), tensor(places)),
        pair_spans_P=tensor(pair_spans[filled]),
        pair_tiles_P=tensor(pair_tiles[filled]),
        unseen_PWL=tensor((distance_PWL < 0)[filled]),
        distance_PWL=tensor(distance_PWL.astype(np.int32)[filled]),
    )
