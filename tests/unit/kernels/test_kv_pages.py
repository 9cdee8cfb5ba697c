"""What is appended token by token is what is read by block, in every format.

Letters: T tokens, N kv heads, D head_dim.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels.fp4 import dequantize_nvfp4, quantize_nvfp4
from moe_kernels.fp8 import dequantize_fp8, quantize_fp8
from moe_kernels.kv_formats import (
    FIXED_SCALES,
    KV_FORMATS,
    CodeName,
    HeadsShape,
    KvFormat,
    KvFormatError,
    KvFormatName,
    KvShape,
    LatentShape,
    Side,
)
from moe_kernels.kv_pages import (
    KvPages,
    LayerScales,
    allocate_pages,
    append,
    append_latent,
    read,
    read_latent,
)
from moe_kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4

pytestmark = pytest.mark.usefixtures("implementation")

NUM_BLOCKS, NUM_HEADS, BLOCK, DIM = 12, 8, 16, 128
SHAPE = HeadsShape(NUM_HEADS, DIM)
TOKENS = 64 + 5  # the last block is filled in part


def random_kv(tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, tokens, NUM_HEADS, DIM, generator=generator).bfloat16().float()
    return k, v


def pages_of(name: KvFormatName, scales: LayerScales | None = None) -> KvPages:
    return allocate_pages(KvFormat(name), SHAPE, NUM_BLOCKS, BLOCK, scales=scales)


def as_kept(name: KvFormatName, side: Side, x: Tensor) -> Tensor:
    """What the format makes of a vector, by the definition of its code."""
    if name in ("fp32", "bf16", "fp16"):
        return x  # bfloat16 inputs, so the plain formats keep every bit
    if name == "mxfp4":
        return dequantize_mxfp4(*quantize_mxfp4(x))
    if name == "fp8" or (name == "k8v4" and side == "key"):
        scale = FIXED_SCALES["fp8", side]
        return dequantize_fp8(quantize_fp8(x, scale), scale)
    scale = FIXED_SCALES["nvfp4", side]
    return dequantize_nvfp4(*quantize_nvfp4(x, scale), scale)


def slots_in(blocks: list[int], tokens: int = TOKENS) -> Tensor:
    at = torch.arange(tokens)
    return torch.tensor(blocks)[at // BLOCK] * BLOCK + at % BLOCK


def read_tokens(pages: KvPages, blocks: list[int], tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Keys and values [T, N, D] of a block table's first tokens."""
    k, v = read(pages, torch.tensor([blocks]))
    return k[0].transpose(0, 1)[:tokens], v[0].transpose(0, 1)[:tokens]


def bytes_of(pages: KvPages, blocks: list[int]) -> list[Tensor]:
    return [tensor[blocks] for tensor in pages.tensors]


def relative_error(x: Tensor, y: Tensor) -> float:
    return float((y - x).norm() / x.norm())


IN_ORDER, SCATTERED = [0, 1, 2, 3, 4], [7, 2, 11, 0, 5]


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_reading_gives_what_the_format_keeps(kv_format: KvFormatName) -> None:
    k, v = random_kv()
    pages = pages_of(kv_format)
    append(pages, k, v, slots_in(IN_ORDER))
    read_k, read_v = read_tokens(pages, IN_ORDER)
    assert torch.equal(read_k, as_kept(kv_format, "key", k))
    assert torch.equal(read_v, as_kept(kv_format, "value", v))


@pytest.mark.parametrize("kv_format", ["nvfp4", "mxfp4"])
def test_d07_keys_and_values_come_back_with_the_same_small_error(kv_format: KvFormatName) -> None:
    k, v = random_kv()
    pages = pages_of(kv_format)
    append(pages, k, v, slots_in(SCATTERED))
    read_k, read_v = read_tokens(pages, SCATTERED)
    key_error, value_error = relative_error(k, read_k), relative_error(v, read_v)
    assert key_error <= 0.12
    assert value_error <= 0.12
    assert abs(key_error - value_error) <= 0.01


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_appending_one_by_one_writes_the_bytes_of_one_bulk(kv_format: KvFormatName) -> None:
    k, v = random_kv()
    slots = slots_in(IN_ORDER)
    bulk, single = pages_of(kv_format), pages_of(kv_format)
    append(bulk, k, v, slots)
    for token in range(TOKENS):
        append(single, k[token : token + 1], v[token : token + 1], slots[token : token + 1])
    for one, other in zip(bytes_of(bulk, IN_ORDER), bytes_of(single, IN_ORDER), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_scattered_blocks_hold_the_bytes_of_contiguous_ones(kv_format: KvFormatName) -> None:
    k, v = random_kv()
    contiguous, scattered = pages_of(kv_format), pages_of(kv_format)
    append(contiguous, k, v, slots_in(IN_ORDER))
    append(scattered, k, v, slots_in(SCATTERED))
    pairs = zip(bytes_of(contiguous, IN_ORDER), bytes_of(scattered, SCATTERED), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    for one, other in zip(
        read_tokens(contiguous, IN_ORDER), read_tokens(scattered, SCATTERED), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_only_the_named_places_are_written(kv_format: KvFormatName) -> None:
    k, v = random_kv()
    pages = pages_of(kv_format)
    append(pages, k, v, slots_in(SCATTERED))
    k, v = read(pages, torch.tensor([[5], *([block] for block in (1, 3, 4, 6, 8, 9, 10))]))
    for kept in (k, v):
        assert bool((kept[0, :, TOKENS % BLOCK :] == 0).all())  # the rest of the last block
        assert bool((kept[0, :, : TOKENS % BLOCK].abs().sum(-1) > 0).all())
        assert bool((kept[1:] == 0).all())  # blocks of nobody


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_token_of_zeros_reads_as_zeros(kv_format: KvFormatName) -> None:
    pages = pages_of(kv_format)
    k, v = random_kv(3)
    k[1], v[1] = 0.0, 0.0
    append(pages, k, v, slots_in([4], 3))
    read_k, read_v = read_tokens(pages, [4], 3)
    assert bool((read_k[1] == 0).all())
    assert bool((read_v[1] == 0).all())
    assert bool(read_k.isfinite().all())


def test_nvfp4_layout_is_linear_data_and_scales_per_head() -> None:
    pages = pages_of("nvfp4")
    k, v = random_kv(1)
    append(pages, k, v, torch.tensor([3 * BLOCK + 9]))
    (page,) = pages.parts
    assert page.scales is not None
    sides: list[tuple[Tensor, Side]] = [(k, "key"), (v, "value")]
    for place, (x, side) in enumerate(sides):
        packed, scales = quantize_nvfp4(x[0], FIXED_SCALES["nvfp4", side])
        assert torch.equal(page.data[3, place, :, 9], packed)
        assert torch.equal(page.scales[3, place, :, 9], scales)


def swapped_nibbles(pages: KvPages) -> KvPages:
    (page,) = pages.parts
    other = dataclasses.replace(page, data=(page.data << 4) | (page.data >> 4))
    return dataclasses.replace(pages, parts=(other,))


def interleaved_scales(pages: KvPages) -> KvPages:
    """Scales of 4 tokens side by side, as some kernels want V's: right shapes, wrong places."""
    (page,) = pages.parts
    assert page.scales is not None
    *lead, tokens, per_token = page.scales.shape
    tiles = page.scales.view(*lead, tokens // 4, 4, per_token).transpose(-1, -2)
    other = dataclasses.replace(page, scales=tiles.reshape(page.scales.shape).contiguous())
    return dataclasses.replace(pages, parts=(other,))


def keys_for_values(pages: KvPages) -> KvPages:
    """The two sides exchanged."""
    (page,) = pages.parts
    assert page.scales is not None
    other = dataclasses.replace(page, data=page.data.flip(1), scales=page.scales.flip(1))
    return dataclasses.replace(pages, parts=(other,))


@pytest.mark.parametrize("kv_format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("mistake", [swapped_nibbles, interleaved_scales, keys_for_values])
def test_a_reader_of_another_layout_fails_the_error_bound(
    mistake: object, kv_format: KvFormatName
) -> None:
    k, v = random_kv(64)
    pages = pages_of(kv_format)
    # Magnitudes that vary by token, as real keys' do, make misplaced scales plain.
    k = k * torch.linspace(0.2, 3.0, 64)[:, None, None]
    append(pages, k, v, slots_in(IN_ORDER, 64))
    assert callable(mistake)
    right, _ = read_tokens(pages, IN_ORDER, 64)
    wrong, _ = read_tokens(mistake(pages), IN_ORDER, 64)
    assert relative_error(k, right) <= 0.12
    assert relative_error(k, wrong) > 0.3


LATENT = LatentShape(64, 32)


def latents(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 96, generator=generator).bfloat16().float()
    return x[:, :64].contiguous(), x[:, 64:].contiguous()


@pytest.mark.parametrize("kv_format", [name for name in KV_FORMATS if name != "k8v4"])
def test_latents_come_back_as_their_codes_keep_them(kv_format: KvFormatName) -> None:
    latent, rope = latents(TOKENS)
    pages = allocate_pages(KvFormat(kv_format), LATENT, NUM_BLOCKS, BLOCK)
    slots = slots_in(SCATTERED)
    append_latent(pages, latent, rope, slots)
    read_latents, read_ropes = read_latent(pages, torch.tensor([SCATTERED]))
    assert read_latents.shape == (1, 5 * BLOCK, 64)
    assert read_ropes.shape == (1, 5 * BLOCK, 32)
    assert torch.equal(read_latents[0, :TOKENS], as_kept(kv_format, "latent", latent))
    fp8_rope = "fp8" if kv_format in ("nvfp4", "mxfp4") else kv_format
    assert torch.equal(read_ropes[0, :TOKENS], as_kept(fp8_rope, "rope", rope))

    single = allocate_pages(KvFormat(kv_format), LATENT, NUM_BLOCKS, BLOCK)
    for token in range(TOKENS):
        one = slice(token, token + 1)
        append_latent(single, latent[one], rope[one], slots[one])
    assert all(torch.equal(a, b) for a, b in zip(pages.tensors, single.tensors, strict=True))


@pytest.mark.parametrize("kv_format", [name for name in KV_FORMATS if name != "k8v4"])
def test_the_probe_looks_at_latents_too(kv_format: KvFormatName) -> None:
    latent, rope = latents(TOKENS)
    pages = allocate_pages(KvFormat(kv_format), LATENT, NUM_BLOCKS, BLOCK)
    pages.probe.wanted = True
    append_latent(pages, latent, rope, slots_in(IN_ORDER))
    few = pages.probe.max_tokens
    fp8_rope = "fp8" if kv_format in ("nvfp4", "mxfp4") else kv_format
    worst = max(
        relative_error(latent[:few], as_kept(kv_format, "latent", latent[:few])),
        relative_error(rope[:few], as_kept(fp8_rope, "rope", rope[:few])),
    )
    assert pages.probe.relative_error == pytest.approx(worst, rel=1e-5)


def test_given_scales_of_latents_are_used() -> None:
    latent, rope = latents(3)
    scales = LayerScales(of_side={"latent": 0.5, "rope": 0.25})
    pages = allocate_pages(KvFormat("nvfp4"), LATENT, 2, BLOCK, scales=scales)
    append_latent(pages, latent, rope, torch.arange(3))
    read_latents, read_ropes = read_latent(pages, torch.tensor([[0]]))
    kept = dequantize_nvfp4(*quantize_nvfp4(latent, 0.5), 0.5)
    assert torch.equal(read_latents[0, :3], kept)
    assert torch.equal(read_ropes[0, :3], dequantize_fp8(quantize_fp8(rope, 0.25), 0.25))


@given(
    name=st.sampled_from(KV_FORMATS),
    heads=st.integers(1, 3),
    width=st.sampled_from([32, 64, 96]),
    block_size=st.sampled_from([16, 32]),
    tokens=st.integers(1, 40),
    cuts=st.lists(st.integers(1, 39), max_size=3),
    seed=st.integers(0, 100),
)
def test_bytes_do_not_depend_on_cuts_order_or_places(
    name: KvFormatName,
    heads: int,
    width: int,
    block_size: int,
    tokens: int,
    cuts: list[int],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, tokens, heads, width, generator=generator)
    shape: KvShape = HeadsShape(heads, width)
    bulk, cut = (allocate_pages(KvFormat(name), shape, 4, block_size) for _ in range(2))
    append(bulk, k, v, torch.arange(tokens))
    # The same tokens in another order, in pieces, two blocks further on.
    order = torch.randperm(tokens, generator=generator)
    moved = (torch.arange(tokens) + 2 * block_size) % (4 * block_size)
    for piece in order.tensor_split(sorted(min(at, tokens) for at in cuts)):
        append(cut, k[piece], v[piece], moved[piece])
    for one, other in zip(bulk.tensors, cut.tensors, strict=True):
        assert torch.equal(one, other.roll(-2, 0))
    both = read(bulk, torch.tensor([[0], [1], [3]])), read(cut, torch.tensor([[2], [3], [1]]))
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


def test_d08_small_values_and_outliers_leave_finite_numbers() -> None:
    for kv_format in KV_FORMATS:
        pages = pages_of(kv_format)
        k, v = random_kv(3)
        v[0] = 0.001
        v[1] = 0.0
        v[2], v[2, :, 5] = 0.01, 1000.0
        append(pages, k, v, slots_in([2], 3))
        _, kept = read_tokens(pages, [2], 3)
        assert relative_error(v[0], kept[0]) <= 0.09, kv_format
        assert bool((kept[1] == 0).all()), kv_format
        assert bool(kept[2].isfinite().all()), kv_format
        # Elements of other blocks than the outlier's do not know of it.
        assert relative_error(v[2, :, 32:], kept[2, :, 32:]) <= 0.18, kv_format


def test_d08_the_cost_of_an_outlier_is_reported() -> None:
    pages = pages_of("nvfp4")
    k, v = random_kv(3)
    v[:], v[2, :, 5] = 0.01, 1000.0
    pages.probe.wanted = True
    append(pages, k, v, slots_in([2], 3))
    error = pages.probe.relative_error
    assert error is not None
    assert math.isfinite(error)
    assert error > 0.9  # values reach to 42 with the fixed scale


@pytest.mark.parametrize("kv_format", ["fp8", "nvfp4", "k8v4"])
def test_d10_given_scales_are_used(kv_format: KvFormatName) -> None:
    k, v = random_kv()
    given = pages_of(kv_format, LayerScales(of_side={"key": 0.05}))
    one = pages_of(kv_format, LayerScales(of_side={"key": 1.0}))
    assert given.global_scales["key"] == pytest.approx(0.05)
    code: CodeName = "nvfp4" if kv_format == "nvfp4" else "fp8"
    value_code: CodeName = "fp8" if kv_format == "fp8" else "nvfp4"
    assert given.global_scales["value"] == FIXED_SCALES[value_code, "value"]
    assert pages_of(kv_format).global_scales["key"] == FIXED_SCALES[code, "key"]
    for pages in (given, one):
        append(pages, k, v, slots_in(IN_ORDER))
    assert not all(torch.equal(a, b) for a, b in zip(given.tensors, one.tensors, strict=True))
    for pages in (given, one):
        read_k, _ = read_tokens(pages, IN_ORDER)
        assert relative_error(k, read_k) <= 0.12


def test_centred_and_scaled_keys_are_stored_as_such() -> None:
    k, v = random_kv()
    center, channel = torch.randn(NUM_HEADS, DIM), torch.rand(NUM_HEADS, DIM) + 0.5
    pages = pages_of("fp32", LayerScales(key_center_ND=center, key_channel_ND=channel))
    append(pages, k, v, slots_in(IN_ORDER))
    read_k, read_v = read_tokens(pages, IN_ORDER)
    assert torch.equal(read_k, (k - center) / channel)
    assert torch.equal(read_v, v)


def test_a_center_pays_where_a_channel_has_an_offset() -> None:
    k, v = random_kv()
    k[..., [3, 40, 77, 101]] += 8.0
    center = LayerScales(key_center_ND=k.mean(dim=0))
    errors = {}
    for name, scales in (("plain", None), ("center", center)):
        pages = pages_of("nvfp4", scales)
        pages.probe.wanted = True
        pages.probe.max_tokens = TOKENS
        append(pages, k, v * 0, slots_in(IN_ORDER))
        errors[name] = pages.probe.relative_error
    assert errors["center"] is not None
    assert errors["plain"] is not None
    assert errors["center"] < 0.7 * errors["plain"]


def test_an_error_that_is_no_number_is_not_told() -> None:
    pages = pages_of("nvfp4")
    k, v = random_kv(2)
    k[0, 0, 0] = math.nan
    pages.probe.wanted = True
    append(pages, k, v, slots_in([0], 2))
    assert pages.probe.relative_error is None


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_the_probe_tells_the_worst_sides_error_of_the_first_tokens(
    kv_format: KvFormatName,
) -> None:
    pages = pages_of(kv_format)
    k, v = random_kv()
    append(pages, k, v, slots_in(IN_ORDER))
    assert pages.probe.relative_error is None
    before = [tensor.clone() for tensor in pages.tensors]
    pages.probe.wanted = True
    append(pages, k, v, slots_in(IN_ORDER))
    assert all(torch.equal(a, b) for a, b in zip(pages.tensors, before, strict=True))
    few = pages.probe.max_tokens
    worst = max(
        relative_error(k[:few], as_kept(kv_format, "key", k[:few])),
        relative_error(v[:few], as_kept(kv_format, "value", v[:few])),
    )
    assert pages.probe.relative_error == pytest.approx(worst, rel=1e-5)
    assert not pages.probe.wanted


def test_a_shape_that_does_not_fit_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(KvFormatError, match="head_dim divisible by 32"):
        allocate_pages(KvFormat("mxfp4"), HeadsShape(1, 48), 1 << 50, 16)
