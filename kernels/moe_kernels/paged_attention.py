"""Causal attention over paged keys and values: the same for decode and prefill, alone or batched.

The unit of work is a pair of a *tile* (TILE_TOKENS queries of one sequence, all query heads that
share a kv head) and a *span* (SPAN_TOKENS keys). Every product has the shape of PAIRS_PER_PRODUCT
pairs, and a query's spans are added up in order of position. So a query's result
depends on its own keys alone, neither on its tile, its chunk, nor on the other sequences.

`plan_attention` decides the order of work once per step from plain integers; `paged_attention`
runs it in every layer. A span past a query's position adds exact zeros, a token past a sequence's
end is read as zero whatever its block held before.

Letters: T tokens, N kv heads, G query heads per kv head, D head_dim, U tiles, M rows of a tile
(TILE_TOKENS · G), P pairs, S spans, L SPAN_TOKENS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_kernels import kv_pages
from moe_kernels.kv_pages import KvPages

TILE_TOKENS = 4
SPAN_TOKENS = 64
PAIRS_PER_PRODUCT = 8
MAX_PAIRS_PER_PASS = 256
MAX_SPANS_PER_PASS = 64
"""Bound the scratch memory of a pass (scores of pairs, keys and values of spans) so that it stays
in the processor's cache. A single tile may pass both."""

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
    """The blocks of each span."""
    last_spans: Tensor
    """The last span of each sequence, as far as this pass reads it …"""
    last_lengths: Tensor
    """… and how many of its tokens exist."""
    pair_spans_P: Tensor
    pair_offsets_P: Tensor
    """Position of the pair's first key."""
    pair_tiles_P: Tensor
    """Tile of each pair, counted within the pass."""


@dataclass(frozen=True)
class AttentionPlan:
    num_tokens: int
    tile_rows_UT: Tensor
    """Row of q for each place of a tile; padding places point at row num_tokens."""
    tile_positions_UT: Tensor
    """Position of each place's query; 0 for padding."""
    place_of_row_T: Tensor
    """Inverse of `tile_rows_UT`, flat."""
    passes: tuple[AttentionPass, ...]


def plan_attention(
    rows: Sequence[AttentionRows], block_size: int, device: str | torch.device = "cpu"
) -> AttentionPlan:
    """Order the work of a step whose tokens are those of `rows`, one sequence after another.

    `block_size` divides SPAN_TOKENS.
    """
    if SPAN_TOKENS % block_size:
        raise ValueError(f"block size {block_size} does not divide {SPAN_TOKENS}")
    tiles = _tiles(rows)
    ranges = _cut(tiles)
    for begin, end in ranges:
        # The longest first: then the tiles that reach span j are a prefix, for every j.
        part = tiles[begin:end]
        tiles[begin:end] = part[np.argsort(-part[:, _SPANS], kind="stable")]
    num_tokens = sum(row.num_tokens for row in rows)
    places = np.arange(TILE_TOKENS)
    real_UT = places < tiles[:, _TOKENS, None]
    tile_rows_UT = np.where(real_UT, tiles[:, _ROW, None] + places, num_tokens)
    positions_UT = np.where(real_UT, tiles[:, _POSITION, None] + places, 0)
    place_of_row = np.zeros(num_tokens, dtype=np.int64)
    place_of_row[tile_rows_UT[real_UT]] = np.flatnonzero(real_UT)
    return AttentionPlan(
        num_tokens=num_tokens,
        tile_rows_UT=torch.from_numpy(tile_rows_UT).to(device),
        tile_positions_UT=torch.from_numpy(positions_UT).to(device),
        place_of_row_T=torch.from_numpy(place_of_row).to(device),
        passes=tuple(
            _plan_pass(tiles, begin, end, rows, block_size, device) for begin, end in ranges
        ),
    )


def paged_attention(q_THD: Tensor, pages: KvPages, plan: AttentionPlan) -> Tensor:
    """softmax(q · kᵀ / √D) · v over each query's keys up to its own position, float32 [T, H, D].

    H = N · G query heads, head h reading kv head h // G. The step's own keys and values must lie
    in the pages already.
    """
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads = pages.data.shape[2]
    group = num_heads // num_kv_heads
    padded = torch.cat((q_THD, q_THD.new_zeros((1, num_heads, head_dim)))) / head_dim**0.5
    q_UNMD = (
        padded[plan.tile_rows_UT]
        .view(-1, TILE_TOKENS, num_kv_heads, group, head_dim)
        .transpose(1, 2)
        .reshape(-1, num_kv_heads, TILE_TOKENS * group, head_dim)
    )
    positions_UM = plan.tile_positions_UT.repeat_interleave(group, dim=1)
    out_UNMD = torch.empty_like(q_UNMD)
    for part in plan.passes:
        tiles = slice(part.first_tile, part.first_tile + part.tiles_per_span[0])
        out_UNMD[tiles] = _run_pass(q_UNMD[tiles], positions_UM[tiles], pages, part)
    by_place = (
        out_UNMD.view(-1, num_kv_heads, TILE_TOKENS, group, head_dim)
        .transpose(1, 2)
        .reshape(-1, num_heads, head_dim)
    )
    return by_place[plan.place_of_row_T]


def _run_pass(q_UNMD: Tensor, positions_UM: Tensor, pages: KvPages, part: AttentionPass) -> Tensor:
    k_SNLD, v_SNLD = _read_spans(pages, part)
    tiles, spans = part.pair_tiles_P, part.pair_spans_P
    scores_PNML = _products(q_UNMD[tiles], k_SNLD.transpose(-1, -2), spans)
    keys_PL = part.pair_offsets_P[:, None] + torch.arange(SPAN_TOKENS, device=q_UNMD.device)
    seen_PML = keys_PL[:, None, :] <= positions_UM[tiles][:, :, None]
    scores_PNML = torch.where(seen_PML[:, None], scores_PNML, -torch.inf)

    # A maximum is the same in any order; sums below go span by span.
    top_PNM = scores_PNML.amax(dim=-1)
    top_UNM = top_PNM[: q_UNMD.shape[0]].clone()
    for begin, count in _segments(part.tiles_per_span):
        torch.maximum(top_UNM[:count], top_PNM[begin : begin + count], out=top_UNM[:count])

    weights_PNML = torch.exp(scores_PNML - top_UNM[tiles][..., None])
    sums_PNM = weights_PNML.sum(dim=-1)
    parts_PNMD = _products(weights_PNML, v_SNLD, spans)
    sum_UNM = torch.zeros_like(top_UNM)
    out_UNMD = torch.zeros_like(q_UNMD)
    for begin, count in _segments(part.tiles_per_span):
        sum_UNM[:count] += sums_PNM[begin : begin + count]
        out_UNMD[:count] += parts_PNMD[begin : begin + count]
    return out_UNMD / sum_UNM[..., None]


def _read_spans(pages: KvPages, part: AttentionPass) -> tuple[Tensor, Tensor]:
    """Keys and values of every span, [S, N, L, D] each; values past a sequence's end are zero."""
    k_SNLD, v_SNLD = kv_pages.read(pages, part.span_blocks_SB)
    # A weight of zero times an old NaN would still be NaN.
    places = torch.arange(SPAN_TOKENS, device=v_SNLD.device)
    stale = places >= part.last_lengths[:, None]
    lasts = v_SNLD[part.last_spans].masked_fill(stale[:, None, :, None], 0.0)
    v_SNLD[part.last_spans] = lasts
    return k_SNLD, v_SNLD


def _products(a_PNMX: Tensor, b_SNXY: Tensor, spans_P: Tensor) -> Tensor:
    """a · b[span] pair by pair, always PAIRS_PER_PRODUCT pairs in a call; P is a multiple."""
    num_pairs, num_kv_heads, num_rows = a_PNMX.shape[:3]
    out_PNMY = a_PNMX.new_empty((num_pairs, num_kv_heads, num_rows, b_SNXY.shape[3]))
    for begin in range(0, num_pairs, PAIRS_PER_PRODUCT):
        pairs = slice(begin, begin + PAIRS_PER_PRODUCT)
        torch.bmm(
            a_PNMX[pairs].flatten(0, 1),
            b_SNXY[spans_P[pairs]].flatten(0, 1),
            out=out_PNMY[pairs].flatten(0, 1),
        )
    return out_PNMY


def _segments(tiles_per_span: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first pair, number of pairs) of each span index."""
    segments, begin = [], 0
    for count in tiles_per_span:
        segments.append((begin, count))
        begin += count
    return segments


# Columns of the tile table.
_SEQUENCE, _ROW, _POSITION, _TOKENS, _SPANS = range(5)


def _tiles(rows: Sequence[AttentionRows]) -> Int64s:
    """A line per tile: sequence, first row of q, its position, tokens, spans it reaches."""
    tables = []
    first_row = 0
    for index, row in enumerate(rows):
        begins = np.arange(0, row.num_tokens, TILE_TOKENS, dtype=np.int64)
        tokens = np.minimum(TILE_TOKENS, row.num_tokens - begins)
        ends = row.start + begins + tokens
        table = np.empty((len(begins), 5), dtype=np.int64)
        table[:, _SEQUENCE] = index
        table[:, _ROW] = first_row + begins
        table[:, _POSITION] = row.start + begins
        table[:, _TOKENS] = tokens
        table[:, _SPANS] = -(-ends // SPAN_TOKENS)
        tables.append(table)
        first_row += row.num_tokens
    return np.concatenate(tables) if tables else np.empty((0, 5), dtype=np.int64)


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
    tiles: Int64s,
    begin: int,
    end: int,
    rows: Sequence[AttentionRows],
    block_size: int,
    device: str | torch.device,
) -> AttentionPass:
    part = tiles[begin:end]
    num_spans = part[:, _SPANS]
    tiles_per_span = tuple(
        int(np.count_nonzero(num_spans > span)) for span in range(int(num_spans[0]))
    )
    pair_tiles = np.concatenate([np.arange(count) for count in tiles_per_span])
    span_index = np.repeat(np.arange(len(tiles_per_span)), tiles_per_span)

    # Each sequence's spans are read once per pass, up to the furthest that its tiles here reach.
    sequences, first_tiles = np.unique(part[:, _SEQUENCE], return_index=True)
    furthest = num_spans[first_tiles]
    first_span = np.concatenate(([0], np.cumsum(furthest)))
    blocks_SB = np.zeros((int(first_span[-1]), SPAN_TOKENS // block_size), dtype=np.int64)
    last_lengths = np.empty(len(sequences), dtype=np.int64)
    for place, index in enumerate(sequences):
        row = rows[index]
        of_sequence = blocks_SB[first_span[place] : first_span[place + 1]].reshape(-1)
        table = row.blocks[: len(of_sequence)]
        of_sequence[: len(table)] = table
        last_start = (furthest[place] - 1) * SPAN_TOKENS
        last_lengths[place] = min(row.start + row.num_tokens - last_start, SPAN_TOKENS)
    sequence_of_pair = np.searchsorted(sequences, part[pair_tiles, _SEQUENCE])
    pair_spans = first_span[sequence_of_pair] + span_index

    filling = np.zeros(-len(pair_tiles) % PAIRS_PER_PRODUCT, dtype=np.int64)

    def tensor(values: Int64s) -> Tensor:
        return torch.from_numpy(values).to(device)

    def filled(values: Int64s) -> Tensor:
        return tensor(np.concatenate((values, filling)))

    return AttentionPass(
        first_tile=begin,
        tiles_per_span=tiles_per_span,
        span_blocks_SB=tensor(blocks_SB),
        last_spans=tensor(first_span[1:] - 1),
        last_lengths=tensor(last_lengths),
        pair_spans_P=filled(pair_spans),
        pair_offsets_P=filled(span_index * SPAN_TOKENS),
        pair_tiles_P=filled(pair_tiles),
    )
