"""Attention over paged keys and values in plain torch.

Every product has the shape of PAIRS_PER_PRODUCT pairs of a tile of queries (with all query heads
that share a kv head) and a span of keys; a query's spans are added up in order of position. A span
that a query does not see adds exact zeros; a token that nobody sees, past a sequence's end or
before every window, is zero whatever its block held before.
Neighbours: `moe_kernels.attention_plan` decides the order of work, `kv_pages` reads the cache.

Letters: T tokens, N kv heads, G query heads per kv head, D head_dim, U tiles, W TILE_TOKENS,
M rows of a tile (W · G), P pairs, S spans, L SPAN_TOKENS.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import kv_pages
from moe_kernels.attention_plan import (
    PAIRS_PER_PRODUCT,
    TILE_TOKENS,
    AttentionPass,
    AttentionPlan,
)
from moe_kernels.kv_formats import LatentShape
from moe_kernels.kv_pages import KvPages


def paged_attention(
    q_THD: Tensor,
    pages: KvPages,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    if window is not None:
        plan = plan.windowed(window)
    tiles = plan.tiles
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads = pages.num_heads
    group = num_heads // num_kv_heads
    padded = torch.cat((q_THD, q_THD.new_zeros((1, num_heads, head_dim))))
    padded = padded / head_dim**0.5 if scale is None else padded * scale
    q_UNMD = (
        padded[tiles.tile_rows_UW]
        .view(-1, TILE_TOKENS, num_kv_heads, group, head_dim)
        .transpose(1, 2)
        .reshape(-1, num_kv_heads, TILE_TOKENS * group, head_dim)
    )
    sinks_UNM = None
    if sinks_H is not None:
        sinks_UNM = _sinks_of_tiles(sinks_H.view(num_kv_heads, group), q_UNMD, pages)
    if pages.key_channel_ND is not None:
        q_UNMD = q_UNMD * pages.key_channel_ND[:, None]
    value_dim = pages.shape.latent_dim if isinstance(pages.shape, LatentShape) else head_dim
    out_UNMD = q_UNMD.new_empty((*q_UNMD.shape[:3], value_dim))
    for part in tiles.passes:
        own = slice(part.first_tile, part.first_tile + part.tiles_per_span[0])
        sinks = None if sinks_UNM is None else sinks_UNM[own]
        out_UNMD[own] = _run_pass(q_UNMD[own], pages, part, sinks)
    by_place = (
        out_UNMD.view(-1, num_kv_heads, TILE_TOKENS, group, value_dim)
        .transpose(1, 2)
        .reshape(-1, num_heads, value_dim)
    )
    return by_place[tiles.place_of_row_T]


def _sinks_of_tiles(sinks_NG: Tensor, q_UNMD: Tensor, pages: KvPages) -> Tensor:
    """A sink's logit beside scores of keys as they are stored: less what a center took from all."""
    sinks_UNM = sinks_NG.repeat(1, TILE_TOKENS).expand(q_UNMD.shape[:3])
    if pages.key_center_ND is None:
        return sinks_UNM
    return sinks_UNM - (q_UNMD * pages.key_center_ND[:, None]).sum(dim=-1)


def _run_pass(
    q_UNMD: Tensor,
    pages: KvPages,
    part: AttentionPass,
    sinks_UNM: Tensor | None,
) -> Tensor:
    k_SNLD, v_SNLD = _read(pages, part.span_blocks_SB)
    # A weight of zero times an old NaN would still be NaN.
    spans, places = part.stale_places
    v_SNLD.transpose(1, 2)[spans, places] = 0.0

    q_PNMD = q_UNMD[part.pair_tiles_P]
    scores_PNML = _products(q_PNMD, k_SNLD.transpose(-1, -2), part.pair_spans_P)
    num_pairs, num_kv_heads, _, num_keys = scores_PNML.shape
    scores_PNWGL = scores_PNML.view(num_pairs, num_kv_heads, TILE_TOKENS, -1, num_keys)
    scores_PNWGL.masked_fill_(part.unseen_PWL[:, None, :, None, :], -torch.inf)

    # A maximum is the same in any order; the sums below go span by span.
    top_PNM = scores_PNML.amax(dim=-1)
    top_UNM = top_PNM[: q_UNMD.shape[0]].clone()
    for tiles, pairs in _by_span(part.tiles_per_span):
        torch.maximum(top_UNM[tiles], top_PNM[pairs], out=top_UNM[tiles])
    if sinks_UNM is not None:
        top_UNM = torch.maximum(top_UNM, sinks_UNM)

    weights_PNML = scores_PNML.sub_(top_UNM[part.pair_tiles_P].unsqueeze(-1)).exp_()
    parts_PNMD = _products(weights_PNML, v_SNLD, part.pair_spans_P)
    sums_PNM = weights_PNML.sum(dim=-1)
    sum_UNM = torch.zeros_like(top_UNM)
    out_UNMD = top_UNM.new_zeros((*top_UNM.shape, v_SNLD.shape[-1]))
    for tiles, pairs in _by_span(part.tiles_per_span):
        sum_UNM[tiles] += sums_PNM[pairs]
        out_UNMD[tiles] += parts_PNMD[pairs]
    if sinks_UNM is not None:
        sum_UNM += (sinks_UNM - top_UNM).exp()
    return out_UNMD / sum_UNM.unsqueeze(-1)


def _read(pages: KvPages, blocks_SB: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [S, N, L, D] and values, which alone may be written to."""
    if not isinstance(pages.shape, LatentShape):
        return kv_pages.read(pages, blocks_SB)
    latent_SLD, rope_SLR = kv_pages.read_latent(pages, blocks_SB)
    return torch.cat((latent_SLD, rope_SLR), dim=-1).unsqueeze(1), latent_SLD.unsqueeze(1)


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


def _by_span(tiles_per_span: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """For each span index, the tiles that reach it and their pairs."""
    slices, begin = [], 0
    for count in tiles_per_span:
        slices.append((slice(count), slice(begin, begin + count)))
        begin += count
    return slices
