"""One step's attention, decided once from plain integers for every layer.

An implementation cuts the step into work as suits it, see `cpu.attention_work`. The reference's
unit is a pair of a *tile* (TILE_TOKENS queries of one sequence) and a *span* (SPAN_TOKENS keys
of it). Pairs are run in passes that fit the processor's cache. Within a pass the longest tiles
come first: the tiles that have a j-th span are then a prefix for every j, and sums need no index.
A layer with a window has a plan of its own, whose tiles begin with the first span that they see:
what lies before is not read. It is not freed either: a block is that of all layers.
Neighbours: `step_tokens` has the whole step, `paged_attention` runs the plan.

Letters: T tokens, U tiles, W TILE_TOKENS, P pairs, S spans (in `RowTable` sequences),
L SPAN_TOKENS, B blocks of a span, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_kernels.derived import Derived

TILE_TOKENS = 4
SPAN_TOKENS = 64
PAIRS_PER_PRODUCT = 8
MAX_PAIRS_PER_PASS = 256
MAX_SPANS_PER_PASS = 64
"""Bound the scratch memory of a pass: scores of pairs, keys and values of spans. A single tile may
pass both."""

Int64s = npt.NDArray[np.int64]


class AttentionRows(NamedTuple):
    """One sequence's share of a step: queries at positions start ≤ p < start + num_tokens."""

    start: int
    num_tokens: int
    blocks: Sequence[int]
    """Its block table, at least up to the last query."""


@dataclass(frozen=True)
class RowTable:
    """The rows as arrays, a line for each sequence."""

    start_S: Int64s
    num_tokens_S: Int64s
    first_row_S: Int64s
    """Its first row of the step's tokens."""
    num_blocks_S: Int64s
    first_block_S: Int64s
    """Where its block table begins among `blocks`."""
    blocks: Int64s
    """All block tables, one after another."""

    @classmethod
    def of_spans(cls, spans_SC: Int64s, blocks: Int64s, block_size: int) -> RowTable:
        """Of a line for each sequence: where it starts, its tokens of the step, its blocks.

        Raises:
            IndexError: a block table is too short.
        """
        start_S, num_tokens_S, num_blocks_S = spans_SC.T.copy()
        short = np.flatnonzero(num_blocks_S * block_size < start_S + num_tokens_S)
        if len(short):
            at = short[0]
            reach = start_S[at] + num_tokens_S[at]
            raise IndexError(f"{num_blocks_S[at]} blocks do not reach {reach} keys")
        return cls(
            start_S=start_S,
            num_tokens_S=num_tokens_S,
            first_row_S=np.cumsum(num_tokens_S) - num_tokens_S,
            num_blocks_S=num_blocks_S,
            first_block_S=np.cumsum(num_blocks_S) - num_blocks_S,
            blocks=blocks,
        )

    def rows(self) -> tuple[AttentionRows, ...]:
        columns = (self.start_S, self.num_tokens_S, self.num_blocks_S, self.first_block_S)
        blocks, lines = self.blocks.tolist(), zip(*(each.tolist() for each in columns), strict=True)
        return tuple(
            AttentionRows(start, num_tokens, blocks[first : first + num_blocks])
            for start, num_tokens, num_blocks, first in lines
        )

    def slots(self, block_size: int) -> tuple[Int64s, Int64s]:
        """Position and slot (block * block_size + offset) of every token of the step."""
        if (self.num_tokens_S == 1).all():
            positions_T, tables_T = self.start_S.copy(), self.first_block_S
        else:
            skew_S = self.start_S - self.first_row_S
            num_tokens = int(self.num_tokens_S.sum())
            positions_T = np.arange(num_tokens) + np.repeat(skew_S, self.num_tokens_S)
            tables_T = np.repeat(self.first_block_S, self.num_tokens_S)
        nth_T, offsets_T = np.divmod(positions_T, block_size)
        return positions_T, self.blocks[tables_T + nth_T] * block_size + offsets_T


@dataclass(frozen=True)
class AttentionPass:
    """Tiles [first_tile, first_tile + U), those with most spans first, and their pairs by span,
    then tile. A tile counts its spans from the first that it sees.

    P is filled up to a multiple of PAIRS_PER_PRODUCT with copies of the first pair, never used.
    """

    first_tile: int
    tiles_per_span: tuple[int, ...]
    """How many of the pass's tiles have a span 0, 1, …; not increasing."""
    span_blocks_SB: Tensor
    stale_places: tuple[Tensor, Tensor]
    """Span and place of every token that is read although no query of the pass sees it: it lies
    past its sequence's end or before every window."""
    pair_spans_P: Tensor
    pair_tiles_P: Tensor
    """Tile of each pair, counted within the pass."""
    unseen_PWL: Tensor
    """True where the key comes after the query or before its window."""


@dataclass(frozen=True)
class TilePlan:
    """The reference's order of work."""

    tile_rows_UW: Tensor
    """Row of q for each place of a tile; padding places point past the last row."""
    place_of_row_T: Tensor
    """Inverse of `tile_rows_UW`, flat."""
    passes: tuple[AttentionPass, ...]


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What a step attends to. What an implementation makes of it is made when first asked for, and
    then serves all layers."""

    table: RowTable
    block_size: int
    device: str | torch.device = "cpu"
    window: int | None = None
    """Queries see so many tokens back, themselves included; None = all."""
    derived: Derived = field(default_factory=Derived, init=False, repr=False)

    def __post_init__(self) -> None:
        if SPAN_TOKENS % self.block_size:
            raise ValueError(f"block size {self.block_size} does not divide {SPAN_TOKENS}")

    @property
    def num_tokens(self) -> int:
        return int(self.table.num_tokens_S.sum())

    @property
    def rows(self) -> tuple[AttentionRows, ...]:
        return self.derived.get("rows", self.table.rows)

    @property
    def tiles(self) -> TilePlan:
        return self.derived.get("tiles", partial(_plan, self))

    def windowed(self, window: int) -> AttentionPlan:
        """The same step's plan for queries that see `window` tokens back, themselves included.

        Made once: all layers that have this window share it.
        """
        return self.derived.get(("window", window), partial(replace, self, window=window))


def plan_attention(
    rows: Sequence[AttentionRows], block_size: int, device: str | torch.device = "cpu"
) -> AttentionPlan:
    """Plan a step whose tokens are those of `rows`, one sequence after another.

    `block_size` divides SPAN_TOKENS.

    Raises:
        IndexError: a block table is too short.
    """
    spans = [(row.start, row.num_tokens, len(row.blocks)) for row in rows]
    blocks = np.array(list(chain.from_iterable(row.blocks for row in rows)), dtype=np.int64)
    spans_SC = np.array(spans, dtype=np.int64).reshape(len(rows), 3)
    return AttentionPlan(RowTable.of_spans(spans_SC, blocks, block_size), block_size, device)


def _plan(plan: AttentionPlan) -> TilePlan:
    rows, block_size, device, window = plan.rows, plan.block_size, plan.device, plan.window
    tiles = _tiles(rows, window)
    ranges = _cut(tiles)
    for begin, end in ranges:
        part = tiles[begin:end]
        tiles[begin:end] = part[np.argsort(part[:, _FIRST] - part[:, _END], kind="stable")]
    real_UW = _PLACES < tiles[:, _TOKENS, None]
    tile_rows_UW = np.where(real_UW, tiles[:, _ROW, None] + _PLACES, plan.num_tokens)
    place_of_row_T = np.zeros(plan.num_tokens, dtype=np.int64)
    place_of_row_T[tile_rows_UW[real_UW]] = np.flatnonzero(real_UW)
    return TilePlan(
        tile_rows_UW=torch.from_numpy(tile_rows_UW).to(device),
        place_of_row_T=torch.from_numpy(place_of_row_T).to(device),
        passes=tuple(
            _plan_pass(begin, tiles[begin:end], rows, block_size, device, window)
            for begin, end in ranges
        ),
    )


# Columns of the tile table.
_SEQUENCE, _ROW, _POSITION, _TOKENS, _FIRST, _END = range(6)
_PLACES = np.arange(TILE_TOKENS)


def _tiles(rows: Sequence[AttentionRows], window: int | None) -> Int64s:
    """A line per tile: sequence, first row of q, its position, tokens, and the spans that it sees,
    from the first to the one before the end."""
    tables = [np.empty((0, 6), dtype=np.int64)]
    first_row = 0
    for index, row in enumerate(rows):
        begins = np.arange(0, row.num_tokens, TILE_TOKENS, dtype=np.int64)
        tokens = np.minimum(TILE_TOKENS, row.num_tokens - begins)
        table = np.empty((len(begins), 6), dtype=np.int64)
        table[:, _SEQUENCE] = index
        table[:, _ROW] = first_row + begins
        table[:, _POSITION] = row.start + begins
        table[:, _TOKENS] = tokens
        table[:, _FIRST] = _first_key(row.start + begins, window) // SPAN_TOKENS
        table[:, _END] = -(-(row.start + begins + tokens) // SPAN_TOKENS)
        tables.append(table)
        first_row += row.num_tokens
    return np.concatenate(tables)


def _first_key(positions: Int64s, window: int | None) -> Int64s:
    """The earliest key that a query at each position sees."""
    if window is None:
        return np.zeros_like(positions)
    return np.maximum(positions - window + 1, 0)


def _cut(tiles: Int64s) -> list[tuple[int, int]]:
    """Ranges of tiles within the bounds of a pass, or of one tile. Tiles of a sequence are in order
    of position, so what it needs more is what lies past its newest tile's end."""
    ranges: list[tuple[int, int]] = []
    begin = pairs = spans = 0
    sequence, reach = -1, 0
    for tile, (owner, first, end) in enumerate(tiles[:, (_SEQUENCE, _FIRST, _END)].tolist()):
        count = end - first
        more = end - max(first, reach) if owner == sequence else count
        too_many = pairs + count > MAX_PAIRS_PER_PASS or spans + more > MAX_SPANS_PER_PASS
        if too_many and tile > begin:
            ranges.append((begin, tile))
            begin, pairs, spans, more = tile, 0, 0, count
        pairs += count
        spans += more
        sequence, reach = owner, end
    return [*ranges, (begin, len(tiles))] if len(tiles) else []


def _plan_pass(
    first_tile: int,
    tiles: Int64s,
    rows: Sequence[AttentionRows],
    block_size: int,
    device: str | torch.device,
    window: int | None,
) -> AttentionPass:
    num_spans = tiles[:, _END] - tiles[:, _FIRST]
    tiles_per_span = [int((num_spans > span).sum()) for span in range(int(num_spans[0]))]
    pair_tiles = np.concatenate([np.arange(count) for count in tiles_per_span])
    span_of_pair = np.repeat(np.arange(len(tiles_per_span)), tiles_per_span)
    span_of_pair += tiles[pair_tiles, _FIRST]

    # A sequence's spans are read once per pass, from the first to the last that a tile here sees.
    sequences, of_tile = np.unique(tiles[:, _SEQUENCE], return_inverse=True)
    position, first, end = (np.empty(len(sequences), dtype=np.int64) for _ in range(3))
    for bound, column in ((position, _POSITION), (first, _FIRST)):
        bound.fill(np.iinfo(np.int64).max)
        np.minimum.at(bound, of_tile, tiles[:, column])
    end.fill(0)
    np.maximum.at(end, of_tile, tiles[:, _END])
    begin = np.concatenate(([0], np.cumsum(end - first)))
    span_blocks_SB = np.zeros((int(begin[-1]), SPAN_TOKENS // block_size), dtype=np.int64)
    stale_SL = np.zeros((int(begin[-1]), SPAN_TOKENS), dtype=bool)
    for place, index in enumerate(sequences):
        own, skipped = slice(begin[place], begin[place + 1]), first[place] * SPAN_TOKENS
        blocks = span_blocks_SB[own].reshape(-1)
        table = rows[index].blocks[skipped // block_size :][: len(blocks)]
        blocks[: len(table)] = table
        stale = stale_SL[own].reshape(-1)
        stale[: _first_key(position[place], window) - skipped] = True
        stale[rows[index].start + rows[index].num_tokens - skipped :] = True
    sequence_of_pair = of_tile[pair_tiles]
    pair_spans = (begin[:-1] - first)[sequence_of_pair] + span_of_pair

    keys_PL = span_of_pair[:, None] * SPAN_TOKENS + np.arange(SPAN_TOKENS)
    # A padding place asks like the tile's first: keys that are seen keep its numbers finite.
    real_UW = _PLACES < tiles[:, _TOKENS, None]
    queries_UW = tiles[:, _POSITION, None] + np.where(real_UW, _PLACES, 0)
    distance_PWL = queries_UW[pair_tiles][:, :, None] - keys_PL[:, None, :]
    unseen_PWL = distance_PWL < 0
    if window is not None:
        unseen_PWL |= distance_PWL >= window

    filling = -len(pair_tiles) % PAIRS_PER_PRODUCT
    filled = np.concatenate((np.arange(len(pair_tiles)), np.zeros(filling, dtype=np.int64)))

    def tensor(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(device)

    spans, places = np.nonzero(stale_SL)
    return AttentionPass(
        first_tile=first_tile,
        tiles_per_span=tuple(tiles_per_span),
        span_blocks_SB=tensor(span_blocks_SB),
        stale_places=(tensor(spans), tensor(places)),
        pair_spans_P=tensor(pair_spans[filled]),
        pair_tiles_P=tensor(pair_tiles[filled]),
        unseen_PWL=tensor(unseen_PWL[filled]),
    )
