"""What is appended token by token is what is read by block, in every format.

Letters: T tokens, N kv heads, D head_dim.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from moe_kernels.fp4 import dequantize_nvfp4, quantize_nvfp4
from moe_kernels.kv_pages import (
    KEY_GLOBAL_SCALE,
    KV_FORMATS,
    VALUE_GLOBAL_SCALE,
    KvFormat,
    KvPages,
    allocate_pages,
    append,
    read,
)

NUM_BLOCKS, NUM_HEADS, BLOCK, DIM = 12, 8, 16, 128
TOKENS = 64 + 5  # the last block is filled in part


def random_kv(tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, tokens, NUM_HEADS, DIM, generator=generator).bfloat16().float()
    return k, v


def pages_of(kv_format: KvFormat) -> KvPages:
    return allocate_pages(kv_format, NUM_BLOCKS, NUM_HEADS, BLOCK, DIM)


def slots_in(blocks: list[int], tokens: int = TOKENS) -> Tensor:
    at = torch.arange(tokens)
    return torch.tensor(blocks)[at // BLOCK] * BLOCK + at % BLOCK


def read_tokens(pages: KvPages, blocks: list[int], tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Keys and values [T, N, D] of a block table's first tokens."""
    k, v = read(pages, torch.tensor([blocks]))
    return k[0].transpose(0, 1)[:tokens], v[0].transpose(0, 1)[:tokens]


def bytes_of(pages: KvPages, blocks: list[int]) -> list[Tensor]:
    tensors = [pages.data] if pages.scales is None else [pages.data, pages.scales]
    return [tensor[blocks] for tensor in tensors]


def relative_error(x: Tensor, y: Tensor) -> float:
    return float((y - x).norm() / x.norm())


IN_ORDER, SCATTERED = [0, 1, 2, 3, 4], [7, 2, 11, 0, 5]


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_reading_gives_what_the_format_keeps(kv_format: KvFormat) -> None:
    k, v = random_kv()
    pages = pages_of(kv_format)
    append(pages, k, v, slots_in(IN_ORDER))
    read_k, read_v = read_tokens(pages, IN_ORDER)
    if kv_format == "nvfp4":
        k = dequantize_nvfp4(*quantize_nvfp4(k, KEY_GLOBAL_SCALE), KEY_GLOBAL_SCALE)
        v = dequantize_nvfp4(*quantize_nvfp4(v, VALUE_GLOBAL_SCALE), VALUE_GLOBAL_SCALE)
    assert torch.equal(read_k, k)  # bfloat16 inputs, so the plain formats keep every bit
    assert torch.equal(read_v, v)


def test_d07_keys_and_values_come_back_with_the_same_small_error() -> None:
    k, v = random_kv()
    pages = pages_of("nvfp4")
    append(pages, k, v, slots_in(SCATTERED))
    read_k, read_v = read_tokens(pages, SCATTERED)
    key_error, value_error = relative_error(k, read_k), relative_error(v, read_v)
    assert key_error <= 0.12
    assert value_error <= 0.12
    assert abs(key_error - value_error) <= 0.01


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_appending_one_by_one_writes_the_bytes_of_one_bulk(kv_format: KvFormat) -> None:
    k, v = random_kv()
    slots = slots_in(IN_ORDER)
    bulk, single = pages_of(kv_format), pages_of(kv_format)
    append(bulk, k, v, slots)
    for token in range(TOKENS):
        append(single, k[token : token + 1], v[token : token + 1], slots[token : token + 1])
    for one, other in zip(bytes_of(bulk, IN_ORDER), bytes_of(single, IN_ORDER), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_scattered_blocks_hold_the_bytes_of_contiguous_ones(kv_format: KvFormat) -> None:
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
def test_only_the_named_places_are_written(kv_format: KvFormat) -> None:
    k, v = random_kv()
    pages = pages_of(kv_format)
    append(pages, k, v, slots_in(SCATTERED))
    k, v = read(pages, torch.tensor([[5], *([block] for block in (1, 3, 4, 6, 8, 9, 10))]))
    for kept in (k, v):
        assert bool((kept[0, :, TOKENS % BLOCK :] == 0).all())  # the rest of the last block
        assert bool((kept[0, :, : TOKENS % BLOCK].abs().sum(-1) > 0).all())
        assert bool((kept[1:] == 0).all())  # blocks of nobody


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_token_of_zeros_reads_as_zeros(kv_format: KvFormat) -> None:
    pages = pages_of(kv_format)
    k, v = random_kv(3)
    k[1], v[1] = 0.0, 0.0
    append(pages, k, v, slots_in([4], 3))
    read_k, read_v = read_tokens(pages, [4], 3)
    assert bool((read_k[1] == 0).all())
    assert bool((read_v[1] == 0).all())
    assert bool(read_k.isfinite().all())


@pytest.mark.parametrize(
    ("kv_format", "head_dim", "per_head"),
    [
        ("fp32", 128, 512),
        ("bf16", 128, 256),
        ("nvfp4", 128, 72),
        ("bf16", 64, 128),
        ("nvfp4", 64, 36),
        ("nvfp4", 32, 18),
    ],
)
def test_bytes_per_token_are_the_documented_ones(
    kv_format: KvFormat, head_dim: int, per_head: int
) -> None:
    pages = allocate_pages(kv_format, 10, 4, 16, head_dim)
    assert pages.num_bytes == 10 * 16 * 2 * 4 * per_head


def test_nvfp4_layout_is_linear_data_and_scales_per_head() -> None:
    pages = pages_of("nvfp4")
    k, v = random_kv(1)
    append(pages, k, v, torch.tensor([3 * BLOCK + 9]))
    assert pages.scales is not None
    for place, (x, g) in enumerate(((k, KEY_GLOBAL_SCALE), (v, VALUE_GLOBAL_SCALE))):
        packed, scales = quantize_nvfp4(x[0], g)
        assert torch.equal(pages.data[3, place, :, 9], packed)
        assert torch.equal(pages.scales[3, place, :, 9], scales)


def test_nvfp4_refuses_a_head_dim_its_blocks_do_not_divide() -> None:
    with pytest.raises(ValueError, match="head_dim divisible by 16, the model's is 40"):
        allocate_pages("nvfp4", 1, 1, 16, 40)


def swapped_nibbles(pages: KvPages) -> KvPages:
    return dataclasses.replace(pages, data=(pages.data << 4) | (pages.data >> 4))


def interleaved_scales(pages: KvPages) -> KvPages:
    """Scales of 4 tokens side by side, as some kernels want V's: right shapes, wrong places."""
    assert pages.scales is not None
    *lead, tokens, per_token = pages.scales.shape
    tiles = pages.scales.view(*lead, tokens // 4, 4, per_token).transpose(-1, -2)
    return dataclasses.replace(pages, scales=tiles.reshape(pages.scales.shape).contiguous())


@pytest.mark.parametrize("mistake", [swapped_nibbles, interleaved_scales])
def test_a_reader_of_another_layout_fails_the_error_bound(mistake: object) -> None:
    k, v = random_kv(64)
    pages = pages_of("nvfp4")
    # Magnitudes that vary by token, as real keys' do, make misplaced scales plain.
    k = k * torch.linspace(0.2, 3.0, 64)[:, None, None]
    append(pages, k, v, slots_in(IN_ORDER, 64))
    assert callable(mistake)
    right, _ = read_tokens(pages, IN_ORDER, 64)
    wrong, _ = read_tokens(mistake(pages), IN_ORDER, 64)
    assert relative_error(k, right) <= 0.12
    assert relative_error(k, wrong) > 0.3
