"""MXFP4 byte by byte and error by error; the oracle for scales is `math.frexp`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from tests.support.number_samples import SAMPLES, gaussian, relative_error


def block(*values: float) -> Tensor:
    return torch.tensor([*values, *([0.0] * (32 - len(values)))])


def round_trip(x: Tensor) -> Tensor:
    return dequantize_mxfp4(*quantize_mxfp4(x))


# (name, block, first bytes of the codes, the others are 0, scale byte = exponent + 127).
GOLDENS = [
    ("all magnitudes", block(0, 0.5, 1, 1.5, 2, 3, 4, 6), "10325476", 127),
    ("all negatives", block(-0.0, -0.5, -1, -1.5, -2, -3, -4, -6), "98badcfe", 127),
    ("low midpoints to even", block(4, 0.25, 0.75, 1.25), "0622", 127),
    ("high midpoints to even", block(4, 1.75, 2.5, 3.5, 5), "466406", 127),
    ("negative midpoints", block(4, -0.25, -0.75, -5), "86ea", 127),
    ("low nibble first", block(6, 0, 0, 6), "0770", 127),
    ("last element, high nibble", block(*[0.0] * 31, 6), "00" * 15 + "70", 127),
    ("just below eight clips", block(7.99, -7.99), "f7", 127),
    ("eight is the next scale", block(8, 2), "26", 128),
    ("three is a scale below", block(3, 1.5), "57", 126),
    ("one", block(1.0), "06", 125),
    ("a power of two is four", block(2.0**-20), "06", 105),
    ("largest finite", block(3.4e38, 2.0**125), "27", 252),
    ("infinite saturates", block(math.inf), "07", 252),
    ("smallest scale", block(2.0**-125), "06", 0),
    ("below the smallest scale", block(2.0**-127, 2.0**-128), "12", 0),
    ("zeros", block(), "", 0),
    ("negative zero", block(-0.0), "08", 0),
]


@pytest.mark.parametrize(
    ("x", "codes", "scale"), [g[1:] for g in GOLDENS], ids=[g[0] for g in GOLDENS]
)
def test_bytes_of_hand_made_blocks(x: Tensor, codes: str, scale: int) -> None:
    packed, scales = quantize_mxfp4(x)
    assert bytes(packed.tolist()).hex() == codes.ljust(32, "0")
    assert scales.tolist() == [scale]


@given(st.floats(2.0**-120, 2.0**120, width=32))
def test_scales_are_the_floor_of_the_logarithm(amax: float) -> None:
    _, scales = quantize_mxfp4(block(amax, -amax / 2))
    exponent = math.frexp(amax)[1] - 1  # amax = m · 2^(exponent+1), ½ ≤ m < 1
    assert scales.tolist() == [exponent - 2 + 127]


def test_scale_bytes_decode_to_powers_of_two() -> None:
    ones = torch.full((256, 16), 0x22, dtype=torch.uint8)
    values = dequantize_mxfp4(ones, torch.arange(256, dtype=torch.uint8)[:, None])
    assert values[:255, 5].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert bool(values[255].isnan().all())


def test_nan_is_seen() -> None:
    x = gaussian(4)
    x[1, 40] = math.nan
    assert bool(round_trip(x)[1, 32:64].isnan().all())
    assert bool(round_trip(x)[[0, 2, 3]].isfinite().all())


# Relative L2 error that a correct implementation shows.
ERRORS = {
    "gaussian": 0.1150,
    "laplace": 0.1266,
    "student": 0.1313,
    "uniform": 0.1441,
    "four channels": 0.1719,
}


@pytest.mark.parametrize("data", ERRORS)
def test_errors_are_those_of_the_format(data: str) -> None:
    x = SAMPLES[data]
    assert relative_error(x, round_trip(x)) == pytest.approx(ERRORS[data], rel=0.02)


def test_gaussian_error_and_direction() -> None:
    x = gaussian()
    y = round_trip(x)
    assert 0.110 <= relative_error(x, y) <= 0.120
    cosine = torch.nn.functional.cosine_similarity(x.double().flatten(), y.double().flatten(), 0)
    assert float(cosine) == pytest.approx(0.99339, abs=0.0005)


def test_error_within_a_block_is_bounded_by_its_largest_value() -> None:
    """Up to a quarter, where values just below 8 clip to 6."""
    x = gaussian().reshape(-1, 32)
    error = (round_trip(x) - x).abs().amax(dim=1)
    assert bool((error <= 0.25 * x.abs().amax(dim=1)).all())


def test_quantising_what_was_read_gives_the_same_bytes() -> None:
    for x in SAMPLES.values():
        packed, scales = quantize_mxfp4(x)
        again = quantize_mxfp4(dequantize_mxfp4(packed, scales))
        assert torch.equal(again[0], packed)
        assert torch.equal(again[1], scales)


def test_zero_blocks_stay_zero_beside_others() -> None:
    x = gaussian(64)
    x[:, 32:64] = 0.0
    y = round_trip(x)
    assert bool((y[:, 32:64] == 0).all())
    assert bool(y.isfinite().all())


def test_rows_are_quantised_alike_alone_and_together() -> None:
    x = gaussian(67)
    packed, scales = quantize_mxfp4(x)
    for rows in (slice(0, 1), slice(66, 67), slice(3, 40)):
        alone = quantize_mxfp4(x[rows].clone())
        assert torch.equal(alone[0], packed[rows])
        assert torch.equal(alone[1], scales[rows])


def test_swapped_nibbles_are_seen() -> None:
    x = gaussian()
    packed, scales = quantize_mxfp4(x)
    y = dequantize_mxfp4((packed << 4) | (packed >> 4), scales)
    assert relative_error(x, y) == pytest.approx(1.41, rel=0.05)
