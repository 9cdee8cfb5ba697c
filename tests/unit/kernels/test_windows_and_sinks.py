"""Attention that looks back a window, with a sink per head, or with a scale of its own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.kv_formats import HeadsShape, KvFormat
from moe_kernels.kv_pages import KvPages, allocate_pages, append
from moe_kernels.paged_attention import paged_attention

pytestmark = pytest.mark.usefixtures("implementation")

KV_HEADS, GROUP, DIM, BLOCK = 2, 3, 32, 16
LENGTHS = [1, 40, 64, 150, 200]


@dataclass(frozen=True)
class Case:
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    tables: list[list[int]]
    pages: KvPages

    def attend(
        self,
        pieces: list[tuple[int, int, int]],
        window: int | None = None,
        sinks_H: Tensor | None = None,
        scale: float | None = None,
    ) -> list[Tensor]:
        """One step with (sequence, start, tokens) pieces; the result of each piece."""
        rows = [AttentionRows(start, count, self.tables[seq]) for seq, start, count in pieces]
        q = torch.cat([self.q[seq][start : start + count] for seq, start, count in pieces])
        plan = plan_attention(rows, BLOCK)
        out = paged_attention(q, self.pages, plan, scale=scale, window=window, sinks_H=sinks_H)
        return list(out.split([count for _, _, count in pieces]))


@pytest.fixture(scope="module")
def case() -> Case:
    generator = torch.Generator().manual_seed(5)
    num_blocks = sum(-(-length // BLOCK) for length in LENGTHS)
    pages = allocate_pages(KvFormat("fp32"), HeadsShape(KV_HEADS, DIM), num_blocks, BLOCK)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    q, k, v, tables = [], [], [], []
    for length in LENGTHS:
        q.append(torch.randn(length, KV_HEADS * GROUP, DIM, generator=generator))
        k.append(torch.randn(length, KV_HEADS, DIM, generator=generator))
        v.append(torch.randn(length, KV_HEADS, DIM, generator=generator))
        tables.append([free.pop() for _ in range(-(-length // BLOCK))])
        at = torch.arange(length)
        append(pages, k[-1], v[-1], torch.tensor(tables[-1])[at // BLOCK] * BLOCK + at % BLOCK)
    return Case(q, k, v, tables, pages)


SINKS = torch.tensor([-2.0, 0.0, 0.5, 1.0, 3.0, 8.0])


def textbook(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None, scale: float
) -> Tensor:
    """In float64, with the sink as one more column that has no value."""
    keys = k.double().repeat_interleave(GROUP, 1).permute(1, 2, 0)
    values = v.double().repeat_interleave(GROUP, 1).transpose(0, 1)
    scores = q.double().transpose(0, 1) @ keys * scale
    unseen = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    if window is not None:
        unseen |= torch.ones(len(q), len(q), dtype=torch.bool).tril(-window)
    scores = scores.masked_fill(unseen, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, column), dim=-1)
    return (scores.softmax(-1)[..., : len(q)] @ values).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 5, 64, 128, 1000])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_it_is_the_textbook_attention(case: Case, window: int | None, sinks: Tensor | None) -> None:
    pieces = [(seq, 0, length) for seq, length in enumerate(LENGTHS)]
    found = case.attend(pieces, window, sinks, scale=0.3)
    for out, q, k, v in zip(found, case.q, case.k, case.v, strict=True):
        expected = textbook(q, k, v, window, sinks, 0.3)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 5, 100])
def test_a_query_is_bit_equal_in_any_chunk_and_company(case: Case, window: int | None) -> None:
    whole = [(seq, 0, length) for seq, length in enumerate(LENGTHS)]
    together = torch.cat(case.attend(whole, window, SINKS))
    for chunk in (1, 3, 16):
        pieces = [
            (seq, start, min(chunk, length - start))
            for seq, length in enumerate(LENGTHS)
            for start in range(0, length, chunk)
        ]
        assert torch.equal(torch.cat(case.attend(pieces, window, SINKS)), together)
        alone = case.attend(pieces[-1:], window, SINKS)[0]
        assert torch.equal(alone, together[-len(alone) :])


def test_a_window_as_long_as_the_sequence_changes_no_bit(case: Case) -> None:
    pieces = [(seq, 0, length) for seq, length in enumerate(LENGTHS)]
    for plain, windowed in zip(case.attend(pieces), case.attend(pieces, max(LENGTHS)), strict=True):
        assert torch.equal(plain, windowed)


def test_layers_with_different_windows_share_a_plan(case: Case) -> None:
    rows = [AttentionRows(0, LENGTHS[3], case.tables[3])]
    plan = plan_attention(rows, BLOCK)
    for window in (7, None, 100, 7):
        shared = paged_attention(case.q[3], case.pages, plan, window=window)
        assert torch.equal(shared, case.attend([(3, 0, LENGTHS[3])], window)[0])
