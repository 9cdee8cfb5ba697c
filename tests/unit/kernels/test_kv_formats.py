"""What each format keeps of a token, in bytes; what it refuses, in words."""

from __future__ import annotations

import pytest
import torch

from moe_kernels.kv_formats import (
    KV_FORMATS,
    HeadsShape,
    KvFormat,
    KvFormatError,
    KvFormatName,
    KvShape,
    LatentShape,
)
from moe_kernels.kv_pages import allocate_pages

MLA = LatentShape(512, 64)
QWEN3 = HeadsShape(4, 128)
MIXTRAL = HeadsShape(8, 128)
LATENT_FORMATS = [name for name in KV_FORMATS if name != "k8v4"]


@pytest.mark.parametrize(
    ("name", "shape", "layers", "expected"),
    [
        ("bf16", QWEN3, 48, 98_304),
        ("fp8", QWEN3, 48, 49_152),
        ("nvfp4", QWEN3, 48, 27_648),
        ("bf16", MIXTRAL, 32, 131_072),
        ("fp8", MIXTRAL, 32, 65_536),
        ("nvfp4", MIXTRAL, 32, 36_864),
        ("fp32", HeadsShape(1, 128), 1, 2 * 512),
        ("fp16", HeadsShape(1, 128), 1, 2 * 256),
        ("k8v4", HeadsShape(1, 128), 1, 2 * 100),
        ("mxfp4", HeadsShape(1, 128), 1, 2 * 68),
        ("nvfp4", HeadsShape(1, 64), 1, 2 * 36),
        ("bf16", MLA, 1, 1152),
        ("fp8", MLA, 1, 576),
        ("nvfp4", MLA, 1, 256 + 32 + 64),
        ("mxfp4", MLA, 1, 256 + 16 + 64),
    ],
)
def test_bytes_per_token_are_the_documented_ones(
    name: KvFormatName, shape: KvShape, layers: int, expected: int
) -> None:
    assert KvFormat(name).bytes_per_token(shape) * layers == expected


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_nvfp4_takes_nine_thirty_seconds_of_bf16(dim: int) -> None:
    shape = HeadsShape(2, dim)
    nvfp4, bf16 = (KvFormat(name).bytes_per_token(shape) for name in ("nvfp4", "bf16"))
    assert nvfp4 * 32 == bf16 * 9  # 3.556 times smaller


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, HeadsShape(3, 64)) for name in KV_FORMATS),
        *((name, LatentShape(64, 16)) for name in LATENT_FORMATS),
    ],
)
def test_pages_have_the_bytes_that_were_announced(name: KvFormatName, shape: KvShape) -> None:
    pages = allocate_pages(KvFormat(name), shape, 5, 16)
    assert pages.num_bytes == 5 * 16 * KvFormat(name).bytes_per_token(shape)
    assert all(len(tensor) == 5 and tensor.is_contiguous() for tensor in pages.tensors)


@pytest.mark.parametrize("name", LATENT_FORMATS)
def test_the_rotated_part_is_never_below_fp8(name: KvFormatName) -> None:
    rope = KvFormat(name).parts(MLA)[1]
    assert rope.sides == ("rope",)
    assert rope.code in ("fp32", "bf16", "fp16", "fp8")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("nvfp4", HeadsShape(1, 40), r"head_dim divisible by 16, the model's is 40; use bf16"),
        ("mxfp4", HeadsShape(1, 80), r"head_dim divisible by 32, the model's is 80; use nvfp4"),
        ("mxfp4", HeadsShape(1, 40), r"head_dim divisible by 32, the model's is 40; use bf16"),
        ("k8v4", HeadsShape(1, 40), r"k8v4 needs a head_dim divisible by 16"),
        ("fp8", HeadsShape(1, 33), r"head_dim divisible by 2"),
        ("nvfp4", LatentShape(500, 64), r"latent divisible by 16, the model's is 500"),
        ("k8v4", MLA, r"k8v4 stores keys and values apart, .* use fp8 or nvfp4"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    name: KvFormatName, shape: KvShape, message: str
) -> None:
    with pytest.raises(KvFormatError, match=message):
        KvFormat(name).bytes_per_token(shape)
    with pytest.raises(KvFormatError, match=message):
        allocate_pages(KvFormat(name), shape, 1, 16, torch.device("cpu"))


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp8", "mxfp4"])
def test_four_over_six_is_refused_where_it_would_do_nothing(name: KvFormatName) -> None:
    with pytest.raises(KvFormatError, match=f"FourOverSix .* {name} has none; use dtype nvfp4"):
        KvFormat(name, "FourOverSix").parts(QWEN3)


def test_pages_of_k8v4_hold_keys_and_values_apart() -> None:
    keys, values = KvFormat("k8v4", "FourOverSix").parts(QWEN3)
    assert (keys.sides, keys.code, keys.bytes_per_token) == (("key",), "fp8", 4 * 128)
    assert (values.sides, values.code, values.bytes_per_token) == (("value",), "nvfp4", 4 * 72)
