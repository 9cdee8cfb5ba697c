"""Attention over every KV format and treatment of keys: the same numbers in any company, and the
format's own error.

Letters: T tokens, N kv heads, G query heads per kv head, D head_dim.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.kv_formats import KV_FORMATS, HeadsShape, KvFormat, KvFormatName
from moe_kernels.kv_pages import KvPages, LayerScales, allocate_pages, append, read
from moe_kernels.paged_attention import paged_attention
from tests.support.number_samples import relative_error

pytestmark = pytest.mark.usefixtures("implementation")

KV_HEADS, GROUP, DIM = 2, 2, 64
SHAPE = HeadsShape(KV_HEADS, DIM)
LENGTHS = [150, 1, 64, 33]
NUM_BLOCKS = 24


def draw(length: int, heads: int = KV_HEADS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randn(length, heads, DIM, generator=generator)


def filled(
    kv_format: KvFormat,
    keys: list[Tensor],
    values: list[Tensor],
    scales: LayerScales | None = None,
) -> tuple[KvPages, list[list[int]]]:
    """Sequences whose blocks lie scattered in one cache, and their block tables."""
    pages = allocate_pages(kv_format, SHAPE, NUM_BLOCKS, 16, scales=scales)
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    tables = []
    for k, v in zip(keys, values, strict=True):
        tables.append([free.pop() for _ in range(-(-len(k) // 16))])
        at = torch.arange(len(k))
        append(pages, k, v, torch.tensor(tables[-1])[at // 16] * 16 + at % 16)
    return pages, tables


def attend(
    pages: KvPages,
    tables: list[list[int]],
    queries: list[Tensor],
    pieces: list[tuple[int, int, int]],
    sinks_H: Tensor | None = None,
) -> Tensor:
    """One step of (sequence, start, tokens) pieces, one after the other."""
    rows = [AttentionRows(start, count, tables[seq]) for seq, start, count in pieces]
    q = torch.cat([queries[seq][start : start + count] for seq, start, count in pieces])
    return paged_attention(q, pages, plan_attention(rows, 16), sinks_H=sinks_H)


def whole(lengths: list[int]) -> list[tuple[int, int, int]]:
    return [(seq, 0, length) for seq, length in enumerate(lengths)]


QUERIES = [draw(length, KV_HEADS * GROUP, seed=1) for length in LENGTHS]
KEYS = [draw(length, seed=2) for length in LENGTHS]
VALUES = [draw(length, seed=3) for length in LENGTHS]


@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_query_is_bit_equal_in_any_chunk_and_company(name: KvFormatName) -> None:
    pages, tables = filled(KvFormat(name), KEYS, VALUES)
    together = attend(pages, tables, QUERIES, whole(LENGTHS))
    alone = [attend(pages, tables, QUERIES, [piece]) for piece in whole(LENGTHS)]
    assert torch.equal(torch.cat(alone), together)
    chunked = [
        (seq, start, min(7, length - start))
        for seq, length in enumerate(LENGTHS)
        for start in range(0, length, 7)
    ]
    assert torch.equal(attend(pages, tables, QUERIES, chunked), together)


# Relative L2 error of the output against fp32, last query of 150 keys: a little more than the
# format's own error of keys and values together.
BOUNDS: dict[KvFormatName, float] = {
    "bf16": 0.005,
    "fp16": 0.001,
    "fp8": 0.05,
    "k8v4": 0.12,
    "nvfp4": 0.16,
    "mxfp4": 0.20,
}


@pytest.mark.parametrize("name", BOUNDS)
def test_outputs_are_as_near_as_the_format_allows(name: KvFormatName) -> None:
    exact = attend(*filled(KvFormat("fp32"), KEYS, VALUES), QUERIES, whole(LENGTHS))
    stored = attend(*filled(KvFormat(name), KEYS, VALUES), QUERIES, whole(LENGTHS))
    error = relative_error(exact, stored)
    assert BOUNDS[name] / 10 < error < BOUNDS[name]


def test_formats_are_ordered_by_their_errors() -> None:
    exact = attend(*filled(KvFormat("fp32"), KEYS, VALUES), QUERIES, whole(LENGTHS))
    formats = [KvFormat("fp8"), KvFormat("k8v4"), KvFormat("nvfp4", "FourOverSix")]
    formats += [KvFormat("nvfp4"), KvFormat("mxfp4")]
    errors = [
        relative_error(exact, attend(*filled(each, KEYS, VALUES), QUERIES, whole(LENGTHS)))
        for each in formats
    ]
    assert errors == sorted(errors)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_d08_small_values_do_not_vanish(name: KvFormatName) -> None:
    values = [torch.full_like(v, 0.001) for v in VALUES]
    pages, tables = filled(KvFormat(name), KEYS, values)
    out = attend(pages, tables, QUERIES, whole(LENGTHS))
    kept = float(out[0, 0, 0])  # every value is alike, so attention must give what is stored
    assert kept == pytest.approx(0.001, rel=0.09 if "4" in name else 0.03)
    torch.testing.assert_close(out, torch.full_like(out, kept), rtol=1e-5, atol=0)


def scales() -> dict[str, LayerScales]:
    center = torch.cat(KEYS).mean(dim=0) + 0.3
    channel = torch.rand(KV_HEADS, DIM, generator=torch.Generator().manual_seed(5)) + 0.5
    return {
        "center": LayerScales(key_center_ND=center),
        "channel": LayerScales(key_channel_ND=channel),
        "both": LayerScales(key_center_ND=center, key_channel_ND=channel),
    }


@pytest.mark.parametrize("treatment", ["center", "channel", "both"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_treated_keys_change_nothing_where_nothing_is_rounded(
    treatment: str, with_sinks: bool
) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    plain = attend(*filled(KvFormat("fp32"), KEYS, VALUES), QUERIES, whole(LENGTHS), sinks)
    pages, tables = filled(KvFormat("fp32"), KEYS, VALUES, scales()[treatment])
    treated = attend(pages, tables, QUERIES, whole(LENGTHS), sinks)
    torch.testing.assert_close(treated, plain, rtol=0, atol=5e-6)
    alone = [attend(pages, tables, QUERIES, [piece], sinks) for piece in whole(LENGTHS)]
    assert torch.equal(torch.cat(alone), treated)


LARGE = torch.ones(DIM).index_fill(0, torch.tensor([3, 20, 41, 60]), 8.0)
"""Four channels larger than the others; queries are as much smaller there, as in models."""


def test_a_center_helps_against_offsets_and_channel_scales_against_large_channels() -> None:
    queries = [q / LARGE for q in QUERIES]

    def error(keys: list[Tensor], given: LayerScales | None) -> float:
        exact = attend(*filled(KvFormat("fp32"), keys, VALUES), queries, whole(LENGTHS))
        pages, tables = filled(KvFormat("nvfp4"), keys, VALUES, given)
        return relative_error(exact, attend(pages, tables, queries, whole(LENGTHS)))

    offset, large = [k + LARGE - 1.0 for k in KEYS], [k * LARGE for k in KEYS]
    center = LayerScales(key_center_ND=torch.cat(offset).mean(dim=0))
    channel = LayerScales(key_channel_ND=torch.cat(large).square().mean(dim=0).sqrt())
    assert error(offset, center) < 0.8 * error(offset, None)
    assert error(large, channel) < 0.8 * error(large, None)


# Relative L2 error of the output over 4096 Gaussian keys of width 128, by spread of the scores.
OUTPUT_ERRORS: list[tuple[KvFormatName, float, float]] = [
    ("fp8", 1.0, 0.039),
    ("nvfp4", 1.0, 0.134),
    ("mxfp4", 1.0, 0.164),
    ("fp8", 4.0, 0.069),
    ("k8v4", 4.0, 0.113),
    ("nvfp4", 4.0, 0.249),
]


@pytest.mark.parametrize(("name", "spread", "expected"), OUTPUT_ERRORS)
def test_output_errors_are_those_of_the_format(
    name: KvFormatName, spread: float, expected: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 1, 128, generator=generator) for n in (256, 4096, 4096))
    pages = allocate_pages(KvFormat(name), HeadsShape(1, 128), 256, 16)
    append(pages, k, v, torch.arange(4096))
    kept_k, kept_v = (x[0, 0].double() for x in read(pages, torch.arange(256)[None]))

    def attention(keys: Tensor, values: Tensor) -> Tensor:
        scores: Tensor = q[:, 0].double() @ keys.T * (spread / 128**0.5)
        return torch.matmul(scores.softmax(dim=-1), values)

    error = relative_error(attention(k[:, 0].double(), v[:, 0].double()), attention(kept_k, kept_v))
    assert error == pytest.approx(expected, rel=0.12)
