"""Contexts of several chunks of keys: the oracle's numbers, and the same bits however threads take
the chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_kernels import implementation as switch
from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.kv_formats import HeadsShape, KvFormat, KvFormatName
from moe_kernels.kv_pages import KvPages, LayerScales, allocate_pages, append
from moe_kernels.paged_attention import paged_attention

pytestmark = pytest.mark.usefixtures("implementation", "two_threads")

BLOCK, KEYS, DIM = 16, 1600, 32


def long_pages(name: KvFormatName, kv_heads: int) -> KvPages:
    generator = torch.Generator().manual_seed(0)
    center = torch.randn(kv_heads, DIM, generator=generator)
    scales = LayerScales(key_center_ND=center)
    shape = HeadsShape(kv_heads, DIM)
    pages = allocate_pages(KvFormat(name), shape, KEYS // BLOCK, BLOCK, scales=scales)
    k, v = torch.randn(2, KEYS, kv_heads, DIM, generator=generator)
    # Far keys count most: their chunks' tops differ by much.
    append(pages, k * torch.linspace(4, 1, KEYS)[:, None, None], v, torch.arange(KEYS))
    return pages


def attend(
    pages: KvPages, pieces: list[tuple[int, int]], window: int | None, sinks_H: Tensor | None
) -> Tensor:
    """Of positions start ≤ p < start + n of each piece; a position's query is always the same."""
    rows = [AttentionRows(start, count, range(KEYS // BLOCK)) for start, count in pieces]
    positions = [at for start, count in pieces for at in range(start, start + count)]
    num_heads = 2 * pages.num_heads
    q_THD = torch.stack(
        [
            torch.randn(num_heads, DIM, generator=torch.Generator().manual_seed(at))
            for at in positions
        ]
    )
    plan = plan_attention(rows, BLOCK)
    return paged_attention(q_THD, pages, plan, window=window, sinks_H=sinks_H)


@pytest.mark.parametrize("window", [None, 20, 700])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("name", "kv_heads"), [("fp32", 1), ("bf16", 3), ("nvfp4", 1)])
def test_chunks_are_joined_alike_by_one_thread_and_by_many(
    name: KvFormatName, kv_heads: int, with_sinks: bool, window: int | None
) -> None:
    pages = long_pages(name, kv_heads)
    sinks = torch.linspace(-2, 9, 2 * kv_heads) if with_sinks else None
    pieces = [(1023, 1), (505, 20), (1580, 20), (0, 1)]
    together = attend(pages, pieces, window, sinks)
    with switch.using("reference"):
        expected = attend(pages, pieces, window, sinks)
    torch.testing.assert_close(together, expected, rtol=0, atol=3e-5)
    last = together[40:41]
    assert torch.equal(attend(pages, [(1599, 1)], window, sinks), last)
    assert torch.equal(attend(pages, [(1023, 1), (1599, 1)], window, sinks)[1:], last)
    assert torch.equal(attend(pages, [(1023, 1)], window, sinks), together[:1])
    torch.set_num_threads(1)
    assert torch.equal(attend(pages, [(1599, 1)], window, sinks), last)


def test_a_nan_in_one_chunk_reaches_the_row() -> None:
    pages = long_pages("fp32", 1)
    pages.parts[0].data[3, 0] = torch.nan
    assert attend(pages, [(1599, 1)], None, None).isnan().all()
    assert attend(pages, [(1599, 1)], 700, None).isfinite().all()
