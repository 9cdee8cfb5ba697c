"""Which tile computes a number is a matter of speed: its bits are those of one row, one token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_kernels import implementation
from moe_kernels.linear import linear

pytestmark = pytest.mark.skipif("cpu" not in implementation.available(), reason="needs numba")

TOKENS, OUTPUTS = 61, 11
"""Tiles of every shape: 1 to 6 tokens at a time, then past a panel, each with rows left over."""


@pytest.fixture(autouse=True)
def _compiled_kernels() -> Iterator[None]:
    with implementation.using("cpu"):
        yield


@pytest.mark.parametrize("inputs", [1, 15, 16, 35, 96, 1500])
def test_no_shape_of_tile_changes_a_bit(inputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(TOKENS, inputs, generator=generator)
    w = torch.randn(OUTPUTS, inputs, generator=generator).bfloat16()
    alone = torch.cat(
        [torch.cat([linear(token, row) for row in w.split(1)], dim=1) for token in x.split(1)]
    )
    for tokens in (*range(1, 31), TOKENS):
        for outputs in (1, 2, 3, 4, 5, OUTPUTS):
            assert torch.equal(linear(x[:tokens], w[:outputs]), alone[:tokens, :outputs])


@pytest.mark.usefixtures("two_threads")
def test_neither_does_a_share_of_the_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, 160, generator=generator)
    w = torch.randn(701, 160, generator=generator).bfloat16()
    shared = linear(x, w)
    torch.set_num_threads(1)
    assert torch.equal(linear(x, w), shared)
