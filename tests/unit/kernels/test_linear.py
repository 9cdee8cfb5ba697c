"""A product's row must be the same bits whatever surrounds it, and the right numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels.linear import linear
from moe_kernels.reference.linear import TILE_ROWS
from tests.support.examples import examples

pytestmark = pytest.mark.usefixtures("implementation")

SHAPES = [(160, 448), (224, 160), (64, 37), (100, 256)]


def random_case(inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(inputs * outputs)
    x = torch.randn(41, inputs, generator=generator)
    return x, torch.randn(outputs, inputs, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_rows_are_bit_equal_in_any_company(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, w = random_case(inputs, outputs, dtype)
    whole = linear(x, w)
    for rows in ([0], [40], [7, 3], list(range(5, 22)), list(range(40, -1, -1))):
        assert torch.equal(linear(x[rows], w), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_input_is_rounded_to_the_weights_dtype_and_summed_in_float32(dtype: torch.dtype) -> None:
    x, w = random_case(160, 448, dtype)
    exact = x.to(dtype).double() @ w.double().t()
    y = linear(x, w)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("two_threads")
def test_number_of_threads_does_not_matter() -> None:
    x, w = random_case(160, 2048, torch.float32)
    with_two = linear(x, w)
    torch.set_num_threads(1)
    assert torch.equal(linear(x, w), with_two)


def test_weights_at_an_odd_address_give_the_same_bits() -> None:
    x, w = random_case(100, 37, torch.float32)
    shifted = torch.empty(w.numel() + 1)[1:].view(w.shape).copy_(w)
    assert torch.equal(linear(x, shifted), linear(x, w))


@pytest.mark.parametrize("rows", [0, 1, TILE_ROWS, TILE_ROWS + 1])
def test_any_number_of_rows(rows: int) -> None:
    assert linear(torch.ones(rows, 8), torch.ones(3, 8)).tolist() == [[8.0] * 3] * rows


@pytest.mark.parametrize("outputs", [1, 2, 3, 4, 8, 11, 12, 15, 16, 17])
@pytest.mark.parametrize("inputs", [10, 22, 31, 256])
def test_few_outputs_as_of_a_small_router_do_not_know_their_place(
    inputs: int, outputs: int
) -> None:
    x, w = random_case(inputs, outputs, torch.float32)
    crowd = linear(x[:1].expand(16, -1), w)
    assert torch.equal(crowd, linear(x[:1], w).expand(16, -1))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int]]:
    """A crowd of rows, weights, and which of the rows come again in another batch."""
    rows, inputs, outputs = (draw(st.integers(1, most)) for most in (120, 130, 70))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    x = torch.randn(rows, inputs, generator=generator)
    w = torch.randn(outputs, inputs, generator=generator).to(dtype)
    return x, w, draw(st.lists(st.integers(0, rows - 1), max_size=40))


@settings(max_examples=examples(60))
@given(batches())
def test_any_company_any_place_any_shape_the_same_bits(
    case: tuple[Tensor, Tensor, list[int]],
) -> None:
    x, w, again = case
    assert torch.equal(linear(x[again], w), linear(x, w)[again])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float, dtype: torch.dtype) -> None:
    x, w = random_case(160, 448, dtype)
    clean = linear(x, w)
    x[17, 3] = bad
    y = linear(x, w)
    others = [row for row in range(41) if row != 17]
    assert torch.equal(y[others], clean[others])
    if bad == torch.inf or bad == -torch.inf:
        assert torch.equal(y[17], bad * w[:, 3].float())
    else:
        assert bool(y[17].isnan().all())


def test_every_pattern_of_nan_survives_rounding() -> None:
    """Rounding to bfloat16 by adding to the bits would carry this one into its sign."""
    worst = torch.tensor([[0x7FFFFFFF]], dtype=torch.int32).view(torch.float32)
    assert bool(linear(worst, torch.ones(1, 1, dtype=torch.bfloat16)).isnan().all())


def test_ties_are_rounded_to_even() -> None:
    halves = 1 + torch.tensor([[1.0], [3.0]]) * 2**-8
    expected = torch.tensor([[1.0], [1 + 2**-6]])
    assert torch.equal(linear(halves, torch.ones(1, 1, dtype=torch.bfloat16)), expected)


def test_operands_need_not_be_contiguous() -> None:
    x, w = random_case(64, 37, torch.bfloat16)
    assert torch.equal(linear(x.t().contiguous().t(), w.t().contiguous().t()), linear(x, w))
