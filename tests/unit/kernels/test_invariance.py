"""Rows may depend on their batch only where somebody asked for that, and only in the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_kernels import implementation, invariance
from moe_kernels.grouped_gemm import expert_mlp
from moe_kernels.linear import linear
from moe_kernels.reference.linear import TILE_ROWS

ROWS = 3 * TILE_ROWS - 5


@pytest.fixture
def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 96, generator=generator)
    return x, torch.randn(64, 96, generator=generator).bfloat16()


def test_it_is_required_until_somebody_says_otherwise() -> None:
    assert invariance.required()
    with invariance.using(False):
        assert not invariance.required()
    assert invariance.required()


def test_all_rows_are_one_product_of_the_library(
    operands: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    heights: list[int] = []
    library = torch.mm

    def counted(x_PH: Tensor, w_HO: Tensor, *, out: Tensor) -> Tensor:
        heights.append(x_PH.shape[0])
        return library(x_PH, w_HO, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    with implementation.using("reference"):
        tiled = linear(*operands)
        assert heights == [TILE_ROWS] * 3
        heights.clear()
        with invariance.using(False):
            whole = linear(*operands)
    assert heights == [3 * TILE_ROWS]
    torch.testing.assert_close(whole, tiled)


@pytest.mark.parametrize("rows", [0, 1, ROWS])
def test_experts_compute_the_same_numbers(rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    w13 = torch.randn(2, 64, 48, generator=generator)
    w2 = torch.randn(2, 48, 32, generator=generator)
    x = torch.randn(rows, 48, generator=generator)
    offsets = torch.tensor([0, rows // 3, rows])
    with implementation.using("reference"):
        tiled = expert_mlp(x, offsets, w13, w2)
        with invariance.using(False):
            torch.testing.assert_close(expert_mlp(x, offsets, w13, w2), tiled, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif("cpu" not in implementation.available(), reason="needs numba")
def test_compiled_kernels_have_nothing_faster_to_take(operands: tuple[Tensor, Tensor]) -> None:
    with implementation.using("cpu"):
        usual = linear(*operands)
        with invariance.using(False):
            assert torch.equal(linear(*operands), usual)
