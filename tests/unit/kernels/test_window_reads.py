"""What lies before every window is not read, so its blocks may hold anything."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from moe_kernels.attention_plan import (
    MAX_PAIRS_PER_PASS,
    MAX_SPANS_PER_PASS,
    PAIRS_PER_PRODUCT,
    SPAN_TOKENS,
    AttentionRows,
    plan_attention,
)
from moe_kernels.kv_formats import HeadsShape, KvFormat
from moe_kernels.kv_pages import allocate_pages, append
from moe_kernels.paged_attention import paged_attention

pytestmark = pytest.mark.usefixtures("implementation")

HEADS, DIM, BLOCK, LENGTH = 2, 16, 16, 400
SINKS = torch.tensor([0.5, -1.0])


@pytest.mark.parametrize("window", [1, 17, 64, 128, 300])
@pytest.mark.parametrize("num_tokens", [1, 3, 50])
def test_blocks_that_windows_have_passed_may_hold_anything(window: int, num_tokens: int) -> None:
    """They are filled with NaN, which neither a weight of zero nor a maximum would hide."""
    generator = torch.Generator().manual_seed(window)
    pages = allocate_pages(KvFormat("fp32"), HeadsShape(HEADS, DIM), LENGTH // BLOCK, BLOCK)
    k, v, q = (torch.randn(LENGTH, HEADS, DIM, generator=generator) for _ in range(3))
    append(pages, k, v, torch.arange(LENGTH))
    start = LENGTH - num_tokens
    plan = plan_attention([AttentionRows(start, num_tokens, range(LENGTH // BLOCK))], BLOCK)

    def attend() -> torch.Tensor:
        return paged_attention(q[start:], pages, plan, window=window, sinks_H=SINKS)

    before = attend()
    passed = (start - window + 1) // BLOCK
    for stored in pages.tensors:
        stored[:passed] = torch.nan
    assert passed > 0
    assert torch.equal(attend(), before)
    for stored in pages.tensors:
        stored[passed] = torch.nan
    assert bool(attend().isnan().any()), "the oldest block that is seen is read"


def test_only_the_spans_of_a_window_are_read() -> None:
    """Two decoding sequences and a chunk of a third, whose first query is at 640."""
    tables = [list(range(first, first + 64)) for first in (0, 64, 128)]
    rows = [
        AttentionRows(1000, 1, tables[0]),
        AttentionRows(5, 1, tables[1]),
        AttentionRows(640, 200, tables[2]),
    ]
    plan = plan_attention(rows, BLOCK).windowed(128)
    read = {
        int(block) // 4 * SPAN_TOKENS
        for part in plan.tiles.passes
        for block in part.span_blocks_SB[:, 0]
    }
    positions = {0: (872, 1000), 1: (0, 5), 2: (513, 839)}
    wanted = {
        (index * 64 // 4 + span) * SPAN_TOKENS
        for index, (first, last) in positions.items()
        for span in range(first // SPAN_TOKENS, last // SPAN_TOKENS + 1)
    }
    assert read == wanted


@pytest.mark.parametrize("window", [1, 100, 1000, 5000])
def test_passes_keep_to_their_bounds_and_have_every_tile_once(window: int) -> None:
    rows = [
        AttentionRows(start, count, range(400))
        for start, count in ((0, 3000), (6000, 1), (63, 2), (4000, 700), (0, 1))
    ]
    plan = plan_attention(rows, BLOCK).windowed(window)
    assert sorted(plan.tiles.place_of_row_T.tolist()) == sorted(
        place
        for place, row in enumerate(plan.tiles.tile_rows_UW.flatten().tolist())
        if row < sum(row.num_tokens for row in rows)
    )
    tiles = 0
    for part in plan.tiles.passes:
        assert part.first_tile == tiles
        tiles += part.tiles_per_span[0]
        assert all(a >= b > 0 for a, b in pairwise((tiles, *part.tiles_per_span)))
        alone = part.tiles_per_span[0] == 1
        assert len(part.pair_spans_P) % PAIRS_PER_PRODUCT == 0
        assert alone or sum(part.tiles_per_span) <= MAX_PAIRS_PER_PASS
        assert alone or len(part.span_blocks_SB) <= MAX_SPANS_PER_PASS
    assert tiles == len(plan.tiles.tile_rows_UW)
