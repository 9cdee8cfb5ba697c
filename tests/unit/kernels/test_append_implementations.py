"""Every implementation of appending writes the bytes of the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels import implementation as switch
from moe_kernels.kv_formats import KV_FORMATS, HeadsShape, KvFormat, KvFormatName, LatentShape
from moe_kernels.kv_pages import (
    KvPages,
    LayerScales,
    allocate_pages,
    append,
    append_latent,
    read,
)
from tests.support.examples import examples

pytestmark = pytest.mark.usefixtures("implementation")

FORMATS = [
    *(KvFormat(name) for name in KV_FORMATS),
    KvFormat("nvfp4", "FourOverSix"),
    KvFormat("k8v4", "FourOverSix"),
]


def assert_same_bytes(one: KvPages, other: KvPages) -> None:
    for x, y in zip(one.tensors, other.tensors, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def spread(tokens: int, heads: int, dim: int, seed: int) -> Tensor:
    """Vectors of very different sizes, some of them zero, outliers among small elements."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-30, 20, (tokens, heads, 1), generator=generator).float())
    x = torch.randn(tokens, heads, dim, generator=generator) * size
    x[torch.rand(tokens, heads, dim, generator=generator) < 0.05] *= 100
    x[torch.rand(tokens, heads, dim, generator=generator) < 0.05] = 0.0
    x[torch.rand(tokens, heads, dim, generator=generator) < 0.05] = -0.0
    return x


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
@given(
    tokens=st.integers(0, 40),
    heads=st.integers(1, 3),
    dim=st.sampled_from([32, 64, 96]),
    block_size=st.sampled_from([8, 16]),
    global_scale=st.sampled_from([None, 0.037, 1.0]),
    with_scales=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=examples(15), deadline=None)
def test_the_bytes_are_the_oracles(
    kv_format: KvFormat,
    tokens: int,
    heads: int,
    dim: int,
    block_size: int,
    global_scale: float | None,
    with_scales: bool,
    seed: int,
) -> None:
    k, v = spread(tokens, heads, dim, seed), spread(tokens, heads, dim, seed + 1000)
    scales = LayerScales(
        of_side={} if global_scale is None else {"key": global_scale, "value": global_scale},
        key_center_ND=spread(1, heads, dim, seed)[0] if with_scales else None,
        key_channel_ND=torch.rand(heads, dim) + 0.5 if with_scales else None,
    )
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:tokens]
    found, expected = (
        allocate_pages(kv_format, HeadsShape(heads, dim), 64 // block_size, block_size, scales=each)
        for each in (scales, scales)
    )
    append(found, k, v, slots)
    with switch.using("reference"):
        append(expected, k, v, slots)
    assert_same_bytes(found, expected)


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_midpoints_and_infinities_are_the_oracles_too(kv_format: KvFormat) -> None:
    grid = torch.arange(-64, 64).view(4, 1, 32) / 8
    steps = torch.exp2(torch.arange(-20, 12).float()).view(-1, 1, 1, 1)
    x = (grid * steps).flatten(0, 1)
    x[7, 0, 3], x[9, 0, 4] = torch.inf, -torch.inf
    found, expected = (allocate_pages(kv_format, HeadsShape(1, 32), 8, 16) for _ in range(2))
    append(found, x, -x, torch.arange(128))
    with switch.using("reference"):
        append(expected, x, -x, torch.arange(128))
    assert_same_bytes(found, expected)


def test_known_bytes_of_nvfp4() -> None:
    """The sixteen codes in order, block scale 1 (E4M3 0x38), and half of all as block scale .5."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 16
    codes = torch.cat((values, -values))
    pages = allocate_pages(KvFormat("nvfp4"), HeadsShape(1, 32), 1, 16)
    append(
        pages,
        torch.cat((codes, codes / 2)).view(1, 1, 32),
        torch.zeros(1, 1, 32),
        torch.tensor([2]),
    )
    data, scales = pages.tensors
    assert bytes(data[0, 0, 0, 2].tolist()).hex() == "1032547698badcfe" * 2
    assert bytes(scales[0, 0, 0, 2].tolist()).hex() == "3830"


def test_known_bytes_of_mxfp4() -> None:
    """Amax 6 · 2⁻⁴: exponent −2, less 2, as a byte 127 − 4."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 16
    codes = torch.cat((values, -values))
    pages = allocate_pages(KvFormat("mxfp4"), HeadsShape(1, 32), 1, 16)
    append(pages, codes.repeat(2).view(1, 1, 32), torch.zeros(1, 1, 32), torch.tensor([2]))
    data, scales = pages.tensors
    assert bytes(data[0, 0, 0, 2].tolist()).hex() == "1032547698badcfe" * 2
    assert scales[0, 0, 0, 2].tolist() == [123]


@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_nan_is_read_as_nan_and_spoils_no_other_vector(name: KvFormatName) -> None:
    x = spread(3, 2, 64, 5).clamp(-1, 1)
    x[1, 0, 40] = torch.nan
    pages = allocate_pages(KvFormat(name), HeadsShape(2, 64), 1, 16)
    append(pages, x, x, torch.arange(3))
    for kept_SNLD in read(pages, torch.tensor([[0]])):
        assert bool(kept_SNLD[0, 0, 1, 40].isnan())
        assert not bool(kept_SNLD[0, 1].isnan().any())
        assert not bool(kept_SNLD[0, 0, [0, 2]].isnan().any())


def test_tensors_may_lie_anyhow() -> None:
    k = spread(64, 2, 20, 3).permute(2, 1, 0)
    found, expected = (allocate_pages(KvFormat("nvfp4"), HeadsShape(2, 64), 2, 16) for _ in "ab")
    append(found, k, k, torch.arange(32).repeat_interleave(2)[::2][:20])
    with switch.using("reference"):
        append(expected, k.contiguous(), k.contiguous(), torch.arange(20))
    assert_same_bytes(found, expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_tokens_are_shared_by_threads(threads: int) -> None:
    k = spread(700, 2, 64, 3)
    found, expected = (allocate_pages(KvFormat("nvfp4"), HeadsShape(2, 64), 44, 16) for _ in "ab")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        append(found, k, -k, torch.arange(700))
    finally:
        torch.set_num_threads(before)
    with switch.using("reference"):
        append(expected, k, -k, torch.arange(700))
    assert_same_bytes(found, expected)


@pytest.mark.parametrize("name", [name for name in KV_FORMATS if name != "k8v4"])
def test_latents_too(name: KvFormatName) -> None:
    latent, rope = spread(30, 1, 96, 1)[:, 0], spread(30, 1, 32, 2)[:, 0]
    found, expected = (allocate_pages(KvFormat(name), LatentShape(96, 32), 2, 16) for _ in "ab")
    append_latent(found, latent, rope, torch.arange(30))
    with switch.using("reference"):
        append_latent(expected, latent, rope, torch.arange(30))
    assert_same_bytes(found, expected)


def test_a_place_outside_of_the_pages_is_refused() -> None:
    pages = allocate_pages(KvFormat("bf16"), HeadsShape(1, 32), 2, 16)
    x = torch.zeros(2, 1, 32)
    with pytest.raises(IndexError):
        append(pages, x, x, torch.tensor([3, 32]))
