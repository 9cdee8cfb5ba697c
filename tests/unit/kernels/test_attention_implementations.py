"""Every implementation of paged attention against the oracle, and against itself in other company.

Letters: T tokens, H query heads, N kv heads, D head_dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels import implementation as switch
from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.kv_formats import KV_FORMATS, HeadsShape, KvFormat, KvFormatName, LatentShape
from moe_kernels.kv_pages import KvPages, LayerScales, allocate_pages, append, append_latent, read
from moe_kernels.paged_attention import paged_attention
from tests.support.examples import examples

pytestmark = pytest.mark.usefixtures("implementation")

Piece = tuple[int, int, int]
"""Sequence, position of the first query, number of queries."""


@dataclass(frozen=True)
class World:
    """Sequences in one cache, and how a layer attends to them."""

    pages: KvPages
    tables: list[list[int]]
    queries: list[Tensor]
    window: int | None = None
    sinks_H: Tensor | None = None

    def attend(self, pieces: list[Piece]) -> list[Tensor]:
        """One step; the result of each piece."""
        rows = [AttentionRows(start, count, self.tables[seq]) for seq, start, count in pieces]
        q_THD = torch.cat([self.queries[seq][start : start + n] for seq, start, n in pieces])
        plan = plan_attention(rows, self.pages.block_size)
        out = paged_attention(
            q_THD, self.pages, plan, scale=0.2, window=self.window, sinks_H=self.sinks_H
        )
        return list(torch.split(out, [count for _, _, count in pieces]))

    @property
    def whole(self) -> list[Piece]:
        return [(seq, 0, len(q)) for seq, q in enumerate(self.queries)]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    name = draw(st.sampled_from(KV_FORMATS))
    dims = [32, 64, 96] if name == "mxfp4" else [16, 48, 64, 80, 128]
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    heads = draw(st.sampled_from([(1, 1), (2, 2), (1, 3), (3, 1), (4, 2), (1, 17)]))
    return make_world(
        name,
        lengths,
        heads,
        draw(st.sampled_from(dims)),
        block_size=draw(st.sampled_from([8, 16, 32])),
        window=draw(st.sampled_from([None, 1, 7, 40])),
        with_sinks=draw(st.booleans()),
        with_scales=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def make_world(
    name: KvFormatName,
    lengths: list[int],
    heads: tuple[int, int] = (2, 2),
    dim: int = 64,
    *,
    block_size: int = 16,
    window: int | None = None,
    with_sinks: bool = False,
    with_scales: bool = False,
    seed: int = 0,
) -> World:
    """`heads` are kv heads and query heads to each."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    kv_heads, group = heads
    scales = LayerScales(
        key_center_ND=normal(kv_heads, dim) if with_scales else None,
        key_channel_ND=normal(kv_heads, dim).abs() + 0.5 if with_scales else None,
    )
    counts = [-(-length // block_size) for length in lengths]
    shape = HeadsShape(kv_heads, dim)
    pages = allocate_pages(KvFormat(name), shape, sum(counts) + 2, block_size, scales=scales)
    free = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    tables, queries = [], []
    for length, count in zip(lengths, counts, strict=True):
        tables.append([free.pop() for _ in range(count)])
        at = torch.arange(length)
        slots = torch.tensor(tables[-1])[at // block_size] * block_size + at % block_size
        append(pages, normal(length, kv_heads, dim), normal(length, kv_heads, dim), slots)
        queries.append(normal(length, kv_heads * group, dim))
    sinks = normal(kv_heads * group) if with_sinks else None
    return World(pages, tables, queries, window, sinks)


@given(world=worlds())
@settings(max_examples=examples(40), deadline=None)
def test_it_agrees_with_the_oracle(implementation: switch.Name, world: World) -> None:
    """Values are near 1, scores reach some tens, each with a rounding of up to 4e-6; tensor cores
    cut what they add instead of rounding it."""
    atol = 1e-4 if implementation == "gpu" else 2e-5
    found = world.attend(world.whole)
    with switch.using("reference"):
        expected = world.attend(world.whole)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@given(world=worlds(), data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_a_row_is_bit_equal_in_any_step_on_any_pages(world: World, data: st.DataObject) -> None:
    together = world.attend(world.whole)
    pieces: list[Piece] = []
    for seq, q in enumerate(world.queries):
        cuts = data.draw(st.sets(st.integers(1, max(1, len(q) - 1)), max_size=4))
        bounds = sorted({0, len(q), *(cut for cut in cuts if cut < len(q))})
        pieces += [(seq, start, end - start) for start, end in pairwise(bounds)]
    chosen = data.draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=8, unique=True))
    moved = permuted(world, data.draw(st.permutations(range(world.pages.num_blocks))))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
        found = moved.attend(chosen)
    finally:
        torch.set_num_threads(threads)
    for (seq, start, count), out in zip(chosen, found, strict=True):
        assert torch.equal(out, together[seq][start : start + count])


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("dim", [32, 64, 96])
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("name", ["bf16", "nvfp4", "mxfp4", "k8v4"])
def test_a_query_alone_gets_the_bits_it_gets_in_a_prompt(
    name: KvFormatName, group: int, dim: int, window: int | None
) -> None:
    """Few rows may be multiplied in another way than many."""
    world = make_world(name, [70], (3, group), dim, window=window)
    together = world.attend(world.whole)[0]
    for at in (0, 1, 15, 16, 69):
        assert torch.equal(world.attend([(0, at, 1)])[0], together[at : at + 1])


def permuted(world: World, places: list[int]) -> World:
    """The same sequences with block b at places[b]."""
    at = torch.tensor(places)
    parts = []
    for page in world.pages.parts:
        data = torch.empty_like(page.data)
        data[at] = page.data
        scales = None if page.scales is None else torch.empty_like(page.scales)
        if scales is not None and page.scales is not None:
            scales[at] = page.scales
        parts.append(dataclasses.replace(page, data=data, scales=scales))
    pages = dataclasses.replace(world.pages, parts=tuple(parts))
    tables = [[places[block] for block in table] for table in world.tables]
    return dataclasses.replace(world, pages=pages, tables=tables)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_four_bits_or_more_give_the_bits_of_the_values_they_stand_for(
    implementation: switch.Name, name: KvFormatName
) -> None:
    """On a GPU the values, but other sums: float32 pages have no part in its tensor cores."""
    world = make_world(name, [70, 33])
    wide = allocate_pages(KvFormat("fp32"), HeadsShape(2, 64), world.pages.num_blocks, 16)
    for side, values in enumerate(read(world.pages, torch.arange(len(wide.tensors[0]))[:, None])):
        wide.parts[0].data[:, side] = values
    expected = dataclasses.replace(world, pages=wide).attend(world.whole)
    found = world.attend(world.whole)
    for one, other in zip(found, expected, strict=True):
        if implementation == "gpu":
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
        else:
            assert torch.equal(one, other)


def test_no_tokens_give_no_rows() -> None:
    world = make_world("bf16", [20])
    plan = plan_attention([], 16)
    assert paged_attention(world.queries[0][:0], world.pages, plan).shape == (0, 4, 64)


def test_queries_may_lie_anyhow() -> None:
    world = make_world("nvfp4", [20])
    plain = world.attend(world.whole)[0]
    lying = torch.empty(64, 4, 20).permute(2, 1, 0)
    lying.copy_(world.queries[0])
    assert not lying.is_contiguous()
    again = dataclasses.replace(world, queries=[lying])
    plan = plan_attention([AttentionRows(0, 20, world.tables[0])], 16)
    assert torch.equal(paged_attention(lying, again.pages, plan, scale=0.2), plain)


def test_a_nan_reaches_the_queries_that_see_it_and_no_other(
    implementation: switch.Name,
) -> None:
    """Of its own sequence too, where the oracle promises nothing for earlier queries."""
    world = make_world("bf16", [60, 30])
    clean = world.attend(world.whole)
    for side in (0, 1):
        pages = permuted(world, list(range(world.pages.num_blocks)))
        pages.pages.parts[0].data[world.tables[0][2], side, :, 5] = torch.nan
        first, second = pages.attend(world.whole)
        assert bool(first[2 * 16 + 5 :].isnan().all())
        assert torch.equal(second, clean[1])
        if implementation == "cpu":
            assert torch.equal(first[: 2 * 16 + 5], clean[0][: 2 * 16 + 5])


def test_a_querys_nan_stays_its_own() -> None:
    world = make_world("bf16", [40])
    clean = world.attend(world.whole)[0]
    queries = world.queries[0].clone()
    queries[17, 2] = torch.nan
    found = dataclasses.replace(world, queries=[queries]).attend(world.whole)[0]
    assert bool(found[17, 2].isnan().all())
    found[17, 2] = clean[17, 2]
    assert torch.equal(found, clean)


def test_infinite_and_huge_scores_follow_the_oracle(implementation: switch.Name) -> None:
    world = make_world("fp32", [40])
    data = world.pages.parts[0].data
    data[world.tables[0][1], 0, 0, 3] *= 1e20
    data[world.tables[0][1], 0, 1, 4] = -torch.inf
    found = world.attend(world.whole)[0]
    with switch.using("reference"):
        expected = world.attend(world.whole)[0]
    assert bool(found[:19].isfinite().all())
    atol = 1e-4 if implementation == "gpu" else 5e-6
    torch.testing.assert_close(found[:19], expected[:19], rtol=0, atol=atol)
    assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("name", [name for name in KV_FORMATS if name != "k8v4"])
def test_latents_agree_with_the_oracle_and_with_themselves(
    implementation: switch.Name, name: KvFormatName
) -> None:
    generator = torch.Generator().manual_seed(1)
    pages = allocate_pages(KvFormat(name), LatentShape(96, 32), 6, 16)
    latents = torch.randn(80, 96, generator=generator)
    append_latent(pages, latents, torch.randn(80, 32, generator=generator), torch.arange(80) + 16)
    q_THD = torch.randn(80, 5, 128, generator=generator)
    whole = plan_attention([AttentionRows(0, 80, range(1, 6))], 16)
    found = paged_attention(q_THD, pages, whole)
    with switch.using("reference"):
        expected = paged_attention(q_THD, pages, whole)
    atol = 1e-4 if implementation == "gpu" else 5e-6
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    for token in (0, 15, 16, 79):
        one = plan_attention([AttentionRows(token, 1, range(1, 6))], 16)
        assert torch.equal(paged_attention(q_THD[token : token + 1], pages, one)[0], found[token])


def test_blocks_outside_of_the_pages_are_refused() -> None:
    pages = allocate_pages(KvFormat("bf16"), HeadsShape(1, 32), 4, 16)
    plan = plan_attention([AttentionRows(17, 1, [0, 4])], 16)
    with pytest.raises(IndexError):
        paged_attention(torch.zeros(1, 1, 32), pages, plan)


def test_a_table_that_ends_before_the_queries_is_refused() -> None:
    with pytest.raises(IndexError, match="1 blocks do not reach 18 keys"):
        plan_attention([AttentionRows(17, 1, [1])], 16)
