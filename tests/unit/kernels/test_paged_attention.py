"""Attention over pages: the textbook's numbers, and the same bits in any company.

Letters: T tokens, N kv heads, G query heads per kv head, D head_dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moe_kernels.attention_plan import (
    MAX_PAIRS_PER_PASS,
    MAX_SPANS_PER_PASS,
    SPAN_TOKENS,
    AttentionRows,
    plan_attention,
)
from moe_kernels.kv_formats import HeadsShape, KvFormat, KvFormatName
from moe_kernels.kv_pages import KvPages, allocate_pages, append, read
from moe_kernels.paged_attention import paged_attention

pytestmark = pytest.mark.usefixtures("implementation")

NUM_BLOCKS = 64


@dataclass(frozen=True)
class Heads:
    kv: int
    group: int
    dim: int


SHAPES = [Heads(2, 2, 32), Heads(1, 4, 16), Heads(3, 1, 48), Heads(2, 3, 64)]
LENGTHS = [1, 16, 63, 64, 65, 150]


@dataclass(frozen=True)
class Case:
    """Sequences whose keys and values lie scattered in one cache."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    tables: list[list[int]]
    pages: KvPages


def make_case(heads: Heads, kv_format: KvFormatName = "fp32", block_size: int = 16) -> Case:
    generator = torch.Generator().manual_seed(heads.dim)
    pages = allocate_pages(
        KvFormat(kv_format), HeadsShape(heads.kv, heads.dim), NUM_BLOCKS, block_size
    )
    free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    q, k, v, tables = [], [], [], []
    for length in LENGTHS:
        q.append(torch.randn(length, heads.kv * heads.group, heads.dim, generator=generator))
        k.append(torch.randn(length, heads.kv, heads.dim, generator=generator))
        v.append(torch.randn(length, heads.kv, heads.dim, generator=generator))
        tables.append([free.pop() for _ in range(-(-length // block_size))])
        at = torch.arange(length)
        slots = torch.tensor(tables[-1])[at // block_size] * block_size + at % block_size
        append(pages, k[-1], v[-1], slots)
    return Case(q, k, v, tables, pages)


def attend(case: Case, pieces: list[tuple[int, int, int]]) -> list[Tensor]:
    """One step with (sequence, start, tokens) pieces; the result of each piece."""
    rows = [AttentionRows(start, count, case.tables[seq]) for seq, start, count in pieces]
    q = torch.cat([case.q[seq][start : start + count] for seq, start, count in pieces])
    out = paged_attention(q, case.pages, plan_attention(rows, case.pages.block_size))
    return list(out.split([count for _, _, count in pieces]))


def textbook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention of a whole sequence in float64."""
    group = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group, 1).permute(1, 2, 0)
    values = v.double().repeat_interleave(group, 1).transpose(0, 1)
    scores = q.double().transpose(0, 1) @ keys / q.shape[-1] ** 0.5
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return (scores.masked_fill(future, -torch.inf).softmax(-1) @ values).transpose(0, 1)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_it_is_causal_softmax_attention(heads: Heads) -> None:
    case = make_case(heads)
    pieces = [(seq, 0, length) for seq, length in enumerate(LENGTHS)]
    for out, q, k, v in zip(attend(case, pieces), case.q, case.k, case.v, strict=True):
        torch.testing.assert_close(out.double(), textbook(q, k, v), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kv_format", ["fp32", "nvfp4"])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_a_query_is_bit_equal_in_any_chunk_and_company(
    heads: Heads, kv_format: KvFormatName
) -> None:
    case = make_case(heads, kv_format)
    together = torch.cat(attend(case, [(seq, 0, length) for seq, length in enumerate(LENGTHS)]))
    alone = [attend(case, [(seq, 0, length)])[0] for seq, length in enumerate(LENGTHS)]
    assert torch.equal(torch.cat(alone), together)
    for chunk in (1, 3, 16):
        pieces = [
            (seq, start, min(chunk, length - start))
            for seq, length in enumerate(LENGTHS)
            for start in range(0, length, chunk)
        ]
        assert torch.equal(torch.cat(attend(case, pieces)), together)
        few = [attend(case, [piece])[0] for piece in pieces[-3:]]
        assert torch.equal(torch.cat(few), together[-sum(count for *_, count in pieces[-3:]) :])


def test_block_size_does_not_matter() -> None:
    pieces = [(seq, 0, length) for seq, length in enumerate(LENGTHS)]
    results = [attend(make_case(SHAPES[0], "nvfp4", size), pieces) for size in (16, 32, 64)]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_what_old_blocks_held_does_not_leak() -> None:
    """A NaN left behind by another request lies past the end of this one's last block."""
    case = make_case(SHAPES[0])
    pieces = [(seq, 0, length) for seq, length in enumerate(LENGTHS)]
    clean = attend(case, pieces)
    for length, table in zip(LENGTHS, case.tables, strict=True):
        if length % 16:
            case.pages.parts[0].data[table[-1], :, :, length % 16 :] = torch.nan
    unused = set(range(NUM_BLOCKS)).difference(*case.tables)
    case.pages.parts[0].data[sorted(unused)] = torch.nan
    case_again = attend(case, pieces)
    assert all(torch.equal(a, b) for a, b in zip(clean, case_again, strict=True))


def test_another_sequences_nan_stays_its_own() -> None:
    case = make_case(SHAPES[0])
    pieces = [(seq, 0, length) for seq, length in enumerate(LENGTHS)]
    clean = attend(case, pieces)
    case.pages.parts[0].data[case.tables[2]] = torch.nan
    poisoned = attend(case, pieces)
    assert bool(poisoned[2].isnan().all())
    for seq in (0, 1, 3, 4, 5):
        assert torch.equal(poisoned[seq], clean[seq])


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_nvfp4_is_attention_over_the_dequantised_values(heads: Heads) -> None:
    """The format changes what is stored and nothing else: equal bits from pages of float32."""
    case = make_case(heads, "nvfp4")
    blocks = torch.arange(NUM_BLOCKS)[:, None]
    wide = allocate_pages(KvFormat("fp32"), HeadsShape(heads.kv, heads.dim), NUM_BLOCKS, 16)
    for place, values in enumerate(read(case.pages, blocks)):
        wide.parts[0].data[:, place] = values
    pieces = [(seq, 0, length) for seq, length in enumerate(LENGTHS)]
    stored = attend(case, pieces)
    expected = attend(dataclasses.replace(case, pages=wide), pieces)
    assert all(torch.equal(a, b) for a, b in zip(stored, expected, strict=True))


def test_nvfp4_keys_and_values_keep_the_direction_of_the_output() -> None:
    exact = make_case(Heads(2, 2, 128), "fp32")
    stored = make_case(Heads(2, 2, 128), "nvfp4")
    piece = [(5, 149, 1)]
    cosine = torch.nn.functional.cosine_similarity(
        attend(exact, piece)[0].flatten().double(), attend(stored, piece)[0].flatten().double(), 0
    )
    # Half the pages' cosine error each from keys and values: .99 on Gaussian data.
    assert float(cosine) >= 0.98


def test_passes_stay_within_their_bounds() -> None:
    rows = [AttentionRows(1000 - 7 * i, 40, list(range(65))) for i in range(30)]
    rows.append(AttentionRows(SPAN_TOKENS * (MAX_SPANS_PER_PASS + 3), 1, list(range(300))))
    plan = plan_attention(rows, 16)
    tiles = 0
    for part in plan.tiles.passes:
        assert part.first_tile == tiles
        tiles += part.tiles_per_span[0]
        within = (
            sum(part.tiles_per_span) <= MAX_PAIRS_PER_PASS
            and len(part.span_blocks_SB) <= MAX_SPANS_PER_PASS
        )
        assert within or part.tiles_per_span[0] == 1
        assert list(part.tiles_per_span) == sorted(part.tiles_per_span, reverse=True)
    assert tiles == len(plan.tiles.tile_rows_UW) == 30 * 10 + 1


def test_a_block_size_that_does_not_divide_a_span_is_refused() -> None:
    with pytest.raises(ValueError, match="block size 48"):
        plan_attention([], 48)
