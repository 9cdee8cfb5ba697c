"""RMS norm and rotary positions against their formulas, and the same bits in any batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_kernels.norm_rope import rms_norm, rope, rope_table

pytestmark = pytest.mark.usefixtures("implementation")


def test_rms_norm_is_its_formula() -> None:
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(0)).double()
    weight = torch.linspace(0.5, 2.0, 48)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(
        rms_norm(x.float(), weight, 1e-5).double(), expected, rtol=0, atol=1e-5
    )


def test_rms_norm_rows_are_bit_equal_in_any_company() -> None:
    for hidden in (48, 100, 161):
        x = torch.randn(33, hidden, generator=torch.Generator().manual_seed(hidden))
        whole = rms_norm(x, torch.ones(hidden), 1e-5)
        for rows in ([0], [32], [5, 1], list(range(3, 20))):
            assert torch.equal(rms_norm(x[rows], torch.ones(hidden), 1e-5), whole[rows])


def plain_table(positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    return rope_table(positions, theta ** (-torch.arange(0, head_dim, 2) / head_dim))


def test_heads_are_normed_to_the_same_bits_in_any_company() -> None:
    for head_dim in (16, 32, 50, 128):
        generator = torch.Generator().manual_seed(head_dim)
        x = torch.randn(33, 5, head_dim, generator=generator)
        whole = rms_norm(x.reshape(-1, head_dim), torch.ones(head_dim), 1e-5)
        for row in (0, 32, 17):
            alone = rms_norm(x[row], torch.ones(head_dim), 1e-5)
            assert torch.equal(alone, whole.view(x.shape)[row])


def test_a_magnitude_lengthens_what_is_turned() -> None:
    cos, sin = rope_table(16, torch.tensor([0.5, 0.1]), magnitude=1.25)
    turned = rope(torch.ones(16, 1, 4), cos, sin)
    torch.testing.assert_close(turned.norm(dim=-1), torch.full((16, 1), 2.5))


def test_elements_past_the_rotated_ones_are_left_alone() -> None:
    cos, sin = rope_table(16, torch.tensor([0.5, 0.1]))
    x = torch.randn(16, 2, 10, generator=torch.Generator().manual_seed(3))
    turned = rope(x, cos, sin)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], rope(x[..., :4], cos, sin))


def test_rope_turns_each_pair_by_position_times_frequency() -> None:
    head_dim, theta = 8, 100.0
    cos, sin = plain_table(16, head_dim, theta)
    x = torch.zeros(1, 1, head_dim)
    x[0, 0, 1] = 1.0
    turned = rope(x, cos[[5]], sin[[5]])[0, 0]
    angle = 5 * theta ** (-2 / head_dim)
    expected = torch.zeros(head_dim)
    expected[1], expected[5] = math.cos(angle), math.sin(angle)
    torch.testing.assert_close(turned, expected)


def test_scores_depend_on_the_distance_only() -> None:
    cos, sin = plain_table(64, 16, 1e4)
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(1))

    def score(at_q: int, at_k: int) -> float:
        return float((rope(q, cos[[at_q]], sin[[at_q]]) * rope(k, cos[[at_k]], sin[[at_k]])).sum())

    assert math.isclose(score(9, 4), score(50, 45), abs_tol=1e-4)
    assert not math.isclose(score(9, 4), score(9, 5), abs_tol=1e-3)


def test_what_is_not_finite_stays_in_its_row() -> None:
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(4))
    clean = rms_norm(x, torch.ones(40), 1e-5)
    x[2, 7] = torch.inf
    x[3, 7] = torch.nan
    y = rms_norm(x, torch.ones(40), 1e-5)
    assert torch.equal(y[[0, 1, 4]], clean[[0, 1, 4]])
    assert y[2].isnan().nonzero().flatten().tolist() == [7]
    assert bool((y[2].nan_to_num() == 0).all())
    assert bool(y[3].isnan().all())


def test_rope_keeps_nan_in_its_pair() -> None:
    cos, sin = plain_table(4, 8, 100.0)
    x = torch.ones(4, 2, 8)
    x[1, 1, 2] = torch.nan
    turned = rope(x, cos, sin)
    assert turned.isnan().nonzero().tolist() == [[1, 1, 2], [1, 1, 6]]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_rows_on_two_threads_are_as_one_row(dtype: torch.dtype) -> None:
    x = torch.randn(600, 4, 64, generator=torch.Generator().manual_seed(6))
    weight = torch.linspace(0.5, 1.5, 64).to(dtype)
    cos, sin = plain_table(600, 64, 1e4)
    normed, turned = rms_norm(x, weight, 1e-5), rope(x, cos, sin)
    for row in (0, 299, 300, 599):
        one = slice(row, row + 1)
        assert torch.equal(rms_norm(x[one], weight, 1e-5), normed[one])
        assert torch.equal(rope(x[one], cos[one], sin[one]), turned[one])


def test_no_rows_are_fine() -> None:
    assert rms_norm(torch.zeros(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert rope(torch.zeros(0, 2, 8), torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0, 2, 8)
