"""FP8 with one scale: byte by byte, and its errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_kernels.fp8 import dequantize_fp8, quantize_fp8
from moe_kernels.kv_formats import FIXED_SCALES
from tests.support.number_samples import SAMPLES, gaussian, relative_error

KEY_SCALE, VALUE_SCALE = FIXED_SCALES["fp8", "key"], FIXED_SCALES["fp8", "value"]

# (value, global scale, byte). 1 bit sign, 4 exponent (bias 7), 3 mantissa.
GOLDENS = [
    (0.0, 1.0, 0x00),
    (-0.0, 1.0, 0x80),
    (1.0, 1.0, 0x38),
    (-1.0, 1.0, 0xB8),
    (1.0625, 1.0, 0x38),  # midpoint of 1 and 1.125: the even mantissa
    (1.1875, 1.0, 0x3A),  # midpoint of 1.125 and 1.25
    (1.07, 1.0, 0x39),
    (2.0**-6, 1.0, 0x08),  # smallest normal
    (2.0**-9, 1.0, 0x01),  # smallest subnormal
    (2.0**-10, 1.0, 0x00),  # midpoint of it and zero
    (448.0, 1.0, 0x7E),  # largest
    (449.0, 1.0, 0x7E),
    (1e9, 1.0, 0x7E),
    (-1e9, 1.0, 0xFE),
    (math.inf, 1.0, 0x7E),
    (0.5, 0.5, 0x38),
    (448 * 0.125, 0.125, 0x7E),
]


@pytest.mark.parametrize(("value", "scale", "byte"), GOLDENS)
def test_bytes_of_hand_made_numbers(value: float, scale: float, byte: int) -> None:
    assert quantize_fp8(torch.tensor([value]), scale).tolist() == [byte]


def test_every_byte_decodes_to_what_it_says() -> None:
    def value(byte: int) -> float:
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        size = 2.0**-9 * mantissa if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
        return math.copysign(math.nan if byte & 127 == 127 else size, -1.0 if byte > 127 else 1.0)

    stored = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([value(byte) for byte in range(256)]) * 0.5
    assert torch.equal(dequantize_fp8(stored, 0.5).nan_to_num(7777.0), expected.nan_to_num(7777.0))


def test_nan_stays_nan() -> None:
    x = torch.tensor([1.0, math.nan])
    assert dequantize_fp8(quantize_fp8(x, 1.0), 1.0).isnan().tolist() == [False, True]


def test_errors_are_those_of_the_format() -> None:
    for data, x in SAMPLES.items():
        error = relative_error(x, round_trip(x, KEY_SCALE))
        # With a fixed scale a uniform sample's edge may fall anywhere between two powers of two.
        assert error == pytest.approx(0.0265, rel=0.12 if data == "uniform" else 0.01), data


@pytest.mark.parametrize(
    ("scale", "stds"), [(KEY_SCALE, [0.01, 0.1, 1, 30]), (VALUE_SCALE, [0.01, 0.1, 1, 10])]
)
def test_fixed_scales_hold_over_the_range_of_magnitudes(scale: float, stds: list[float]) -> None:
    for std in stds:
        x = gaussian(2**12, std=std)
        assert relative_error(x, round_trip(x, scale)) <= 0.034


def test_quantising_what_was_read_gives_the_same_bytes() -> None:
    stored = quantize_fp8(SAMPLES["student"], KEY_SCALE)
    assert torch.equal(quantize_fp8(dequantize_fp8(stored, KEY_SCALE), KEY_SCALE), stored)


def round_trip(x: Tensor, scale: float) -> Tensor:
    return dequantize_fp8(quantize_fp8(x, scale), scale)
