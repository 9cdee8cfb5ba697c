"""NVFP4 byte by byte and error by error.

The oracle is the definition in plain Python: nearest of the eight magnitudes, even code on a tie.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels.e2m1 import E2M1_VALUES
from moe_kernels.fp4 import dequantize_nvfp4, quantize_nvfp4
from moe_kernels.kv_formats import FIXED_SCALES, Encoding
from tests.support.number_samples import SAMPLES, gaussian, relative_error

KEY_GLOBAL_SCALE = FIXED_SCALES["nvfp4", "key"]
VALUE_GLOBAL_SCALE = FIXED_SCALES["nvfp4", "value"]


def block(*values: float) -> Tensor:
    return torch.tensor([*values, *([0.0] * (16 - len(values)))])


def round_trip(
    x: Tensor, global_scale: float = KEY_GLOBAL_SCALE, encoding: Encoding = "Standard"
) -> Tensor:
    return dequantize_nvfp4(*quantize_nvfp4(x, global_scale, encoding), global_scale)


# (name, block, global scale, codes as bytes, scale byte). E4M3: 1.0 is 0x38, twice that 0x40.
GOLDENS = [
    ("all magnitudes", block(0, 0.5, 1, 1.5, 2, 3, 4, 6), 1.0, "1032547600000000", 0x38),
    ("all negatives", block(-0.0, -0.5, -1, -1.5, -2, -3, -4, -6), 1.0, "98badcfe00000000", 0x38),
    ("low midpoints to even", block(6, 0.25, 0.75, 1.25), 1.0, "0722000000000000", 0x38),
    ("high midpoints to even", block(6, 1.75, 2.5, 3.5, 5), 1.0, "4764060000000000", 0x38),
    ("negative midpoints", block(6, -0.25, -0.75, -5), 1.0, "87ea000000000000", 0x38),
    ("above midpoints", block(6, 0.2501, 1.2501, 2.5001, 5.0001), 1.0, "1753070000000000", 0x38),
    ("below midpoints", block(6, 0.7499, 1.7499, 3.4999), 1.0, "1753000000000000", 0x38),
    ("low nibble first", block(6, 0, 0, 6), 1.0, "0770000000000000", 0x38),
    ("last element, high nibble", block(*[0.0] * 15, 6), 1.0, "0000000000000070", 0x38),
    ("scale rounded down saturates", block(6.2, 6), 1.0, "7700000000000000", 0x38),
    ("scale rounded up", block(6.5), 1.0, "0700000000000000", 0x39),
    ("scale two", block(12, 1), 1.0, "1700000000000000", 0x40),
    ("keys' global scale", block(6, 1), 2.0**-4, "2700000000000000", 0x38 + 4 * 8),
    ("largest scale", block(1e9, 448), 1.0, "2700000000000000", 0x7E),
    ("smallest scale", block(6 * 2.0**-9), 1.0, "0700000000000000", 0x01),
    ("zeros", block(), 1.0, "0000000000000000", 0x00),
    ("below the smallest scale", block(1e-9, -1e-9), 1.0, "8000000000000000", 0x00),
]  # fmt: skip


@pytest.mark.parametrize(
    ("x", "g", "codes", "scale"), [g[1:] for g in GOLDENS], ids=[g[0] for g in GOLDENS]
)
def test_bytes_of_hand_made_blocks(x: Tensor, g: float, codes: str, scale: int) -> None:
    packed, scales = quantize_nvfp4(x, g)
    assert bytes(packed.tolist()).hex() == codes
    assert scales.tolist() == [scale]


# (name, block, codes as bytes, scale byte) of FourOverSix with a global scale of 1.
FOUR_OVER_SIX = [
    ("both exact: Standard's", block(6, 3), "5700000000000000", 0x38),
    ("four finds 4.5 exactly", block(6, 4.5), "5600000000000000", 0x3C),
    ("six is nearer", block(6, 0.5, 1, 4), "1762000000000000", 0x38),
    ("zeros", block(), "0000000000000000", 0x00),
]


@pytest.mark.parametrize(
    ("x", "codes", "scale"), [g[1:] for g in FOUR_OVER_SIX], ids=[g[0] for g in FOUR_OVER_SIX]
)
def test_four_over_six_takes_the_scale_with_the_smaller_error(
    x: Tensor, codes: str, scale: int
) -> None:
    packed, scales = quantize_nvfp4(x, 1.0, "FourOverSix")
    assert bytes(packed.tolist()).hex() == codes
    assert scales.tolist() == [scale]


def test_four_over_six_is_never_worse_in_any_block() -> None:
    for x in SAMPLES.values():
        error = {
            encoding: (round_trip(x, encoding=encoding) - x).double().square().view(-1, 16).sum(1)
            for encoding in ("Standard", "FourOverSix")
        }
        # The choice is made in float32 sums.
        assert bool((error["FourOverSix"] <= error["Standard"] * (1 + 1e-6)).all())


# Relative L2 error that a correct implementation shows, by (data, encoding).
ERRORS = {
    ("gaussian", "Standard"): 0.0951,
    ("laplace", "Standard"): 0.0927,
    ("student", "Standard"): 0.0918,
    ("uniform", "Standard"): 0.1016,
    ("four channels", "Standard"): 0.0858,
    ("gaussian", "FourOverSix"): 0.0870,
    ("laplace", "FourOverSix"): 0.0871,
    ("student", "FourOverSix"): 0.0869,
    ("uniform", "FourOverSix"): 0.0867,
    ("four channels", "FourOverSix"): 0.0848,
}


@pytest.mark.parametrize(("data", "encoding"), ERRORS)
def test_errors_are_those_of_the_format(data: str, encoding: Encoding) -> None:
    x = SAMPLES[data]
    error = relative_error(x, round_trip(x, encoding=encoding))
    assert error == pytest.approx(ERRORS[data, encoding], rel=0.02)


def test_large_channels_spoil_the_others_of_their_blocks() -> None:
    x = SAMPLES["four channels"]
    small = x.abs().amax(dim=0) < 8
    assert int((~small).sum()) == 4
    assert relative_error(x[:, small], round_trip(x)[:, small]) == pytest.approx(0.32, abs=0.02)


def test_four_over_six_gaussian_error() -> None:
    x = gaussian()
    assert 0.082 <= relative_error(x, round_trip(x, encoding="FourOverSix")) <= 0.091


def test_every_byte_decodes_to_its_two_nibbles() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(32, 8)
    scales = torch.full((32, 1), 0x40, dtype=torch.uint8)
    values = dequantize_nvfp4(packed, scales, 0.5).reshape(256, 2).tolist()
    signed = [*E2M1_VALUES, *(-value for value in E2M1_VALUES)]
    assert values == [[signed[byte % 16], signed[byte // 16]] for byte in range(256)]


def nearest_code(value: float) -> int:
    size = abs(value)
    distance = [abs(size - magnitude) for magnitude in E2M1_VALUES]
    best = min(distance)
    index = min((i for i, d in enumerate(distance) if d == best), key=lambda i: i % 2)
    return index + 8 * (math.copysign(1.0, value) < 0)


@given(
    st.lists(st.integers(-800, 800), min_size=16, max_size=16),
    st.sampled_from([1.0, KEY_GLOBAL_SCALE, VALUE_GLOBAL_SCALE]),
)
def test_codes_are_the_nearest_to_x_over_the_stored_step(hundredths: list[int], g: float) -> None:
    x = torch.tensor([value / 64 for value in hundredths])
    packed, scales = quantize_nvfp4(x, g)
    step = float(scales.view(torch.float8_e4m3fn).float()) * g
    codes = [nibble for byte in packed.tolist() for nibble in (byte & 15, byte >> 4)]
    assert step > 0 or not any(hundredths)
    for value, code in zip(x.tolist(), codes, strict=True):
        if step > 0:
            ratio = float(torch.tensor(value) / torch.tensor(step))
            assert code == nearest_code(ratio)


@pytest.mark.parametrize("g", [KEY_GLOBAL_SCALE, VALUE_GLOBAL_SCALE])
def test_gaussian_error_is_what_the_format_gives(g: float) -> None:
    x = gaussian()
    y = round_trip(x, g)
    assert 0.090 <= relative_error(x, y) <= 0.100
    cosine = torch.nn.functional.cosine_similarity(x.double().flatten(), y.double().flatten(), 0)
    assert 0.9950 <= float(cosine) <= 0.9960


@pytest.mark.parametrize(
    ("g", "stds"),
    [(KEY_GLOBAL_SCALE, [0.001, 0.01, 1, 30]), (VALUE_GLOBAL_SCALE, [0.001, 0.1, 10])],
)
def test_fixed_global_scales_hold_over_the_range_of_magnitudes(g: float, stds: list[float]) -> None:
    for std in stds:
        x = gaussian(2**12, std=std)
        assert 0.090 <= relative_error(x, round_trip(x, g)) <= 0.108


@pytest.mark.parametrize("encoding", ["Standard", "FourOverSix"])
def test_error_within_a_block_is_bounded_by_its_largest_value(encoding: Encoding) -> None:
    x = gaussian().reshape(-1, 16)
    error = (round_trip(x, encoding=encoding) - x).abs().amax(dim=1)
    assert bool((error <= 0.18 * x.abs().amax(dim=1)).all())


@pytest.mark.parametrize("encoding", ["Standard", "FourOverSix"])
def test_quantising_what_was_read_gives_the_same_bytes(encoding: Encoding) -> None:
    packed, scales = quantize_nvfp4(gaussian(), KEY_GLOBAL_SCALE, encoding)
    read = dequantize_nvfp4(packed, scales, KEY_GLOBAL_SCALE)
    again = quantize_nvfp4(read, KEY_GLOBAL_SCALE, encoding)
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scales)


def test_four_over_six_keeps_values_where_both_scales_hold_them() -> None:
    """Then the scale byte may change once, what is read never."""
    for x in SAMPLES.values():
        once = round_trip(x, encoding="FourOverSix")
        assert torch.equal(round_trip(once, encoding="FourOverSix"), once)


def test_zero_blocks_stay_zero_beside_others() -> None:
    x = gaussian(64)
    x[:, 16:32] = 0.0
    packed, scales = quantize_nvfp4(x, KEY_GLOBAL_SCALE)
    y = dequantize_nvfp4(packed, scales, KEY_GLOBAL_SCALE)
    assert bool((scales[:, 1] == 0).all())
    assert bool((y[:, 16:32] == 0).all())
    assert bool(y.isfinite().all())


def test_bfloat16_rounding_alone_is_far_smaller() -> None:
    x = gaussian()
    assert relative_error(x, x.bfloat16().float()) == pytest.approx(0.0017, abs=0.0002)


@pytest.mark.parametrize("encoding", ["Standard", "FourOverSix"])
def test_rows_are_quantised_alike_alone_and_together(encoding: Encoding) -> None:
    x = gaussian(67)
    packed, scales = quantize_nvfp4(x, KEY_GLOBAL_SCALE, encoding)
    for rows in (slice(0, 1), slice(66, 67), slice(3, 40)):
        alone = quantize_nvfp4(x[rows].clone(), KEY_GLOBAL_SCALE, encoding)
        assert torch.equal(alone[0], packed[rows])
        assert torch.equal(alone[1], scales[rows])


def swap_nibbles(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return (packed << 4) | (packed >> 4), scales


def shuffle_scales(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.randperm(scales.shape[0], generator=torch.Generator().manual_seed(5))
    return packed, scales[order]


@pytest.mark.parametrize(
    ("mistake", "error"), [(swap_nibbles, 1.41), (shuffle_scales, 0.35)], ids=["nibbles", "scales"]
)
def test_a_wrong_layout_is_seen(mistake: object, error: float) -> None:
    """The bound above catches these: their errors are of another size."""
    x = gaussian()
    assert callable(mistake)
    y = dequantize_nvfp4(*mistake(*quantize_nvfp4(x, KEY_GLOBAL_SCALE)), KEY_GLOBAL_SCALE)
    assert relative_error(x, y) == pytest.approx(error, rel=0.05)
