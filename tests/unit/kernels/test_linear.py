"""A product's row must be the same bits whatever surrounds it, and the right numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moe_kernels.linear import linear
from moe_kernels.reference.linear import TILE_ROWS

pytestmark = pytest.mark.usefixtures("implementation")

SHAPES = [(160, 448), (224, 160), (64, 37), (100, 256)]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


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
