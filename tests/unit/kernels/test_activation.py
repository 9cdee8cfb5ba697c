"""The middle of an expert: formulas, biases around it, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from moe_kernels.activation import Activation, Silu, SwigluOai, gated
from moe_kernels.grouped_gemm import expert_mlp

pytestmark = pytest.mark.usefixtures("implementation")

ACTS = [Silu(), SwigluOai(limit=1.5, alpha=1.702)]


def formula(both: torch.Tensor, act: Activation) -> torch.Tensor:
    gate, up = both.double().chunk(2, dim=-1)
    if isinstance(act, Silu):
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    return gate * torch.sigmoid(act.alpha * gate) * (up + 1)


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_it_is_its_formula(act: Activation) -> None:
    both = torch.randn(9, 34, generator=torch.Generator().manual_seed(0)) * 2
    torch.testing.assert_close(gated(both, act).double(), formula(both, act), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize("width", [2, 34, 66, 100])
def test_rows_are_bit_equal_in_any_company(act: Activation, width: int) -> None:
    both = torch.randn(33, width, generator=torch.Generator().manual_seed(width))
    whole = gated(both, act)
    for rows in ([0], [32], [5, 1], list(range(3, 20))):
        assert torch.equal(gated(both[rows], act), whole[rows])


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_experts_have_biases_of_their_own(act: Activation) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    hidden, inner, counts = 12, 10, [3, 0, 18]
    rows, w13, w2 = draw(21, hidden), draw(3, 2 * inner, hidden), draw(3, hidden, inner)
    b13, b2 = draw(3, 2 * inner), draw(3, hidden)
    offsets = torch.tensor([0, 3, 3, 21])
    out = expert_mlp(rows, offsets, w13, w2, act=act, b13_S2I=b13, b2_SH=b2)
    start = 0
    for slot, count in enumerate(counts):
        mine = rows[start : start + count].double()
        both = mine @ w13[slot].double().t() + b13[slot].double()
        expected = formula(both, act) @ w2[slot].double().t() + b2[slot].double()
        found = out[start : start + count].double()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        alone = expert_mlp(
            rows[start : start + 1], torch.tensor([0, 1]), w13[slot : slot + 1],
            w2[slot : slot + 1], act=act, b13_S2I=b13[slot : slot + 1], b2_SH=b2[slot : slot + 1],
        ) if count else None  # fmt: skip
        assert alone is None or torch.equal(alone[0], out[start])
        start += count


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_extremes_follow_the_formula(act: Activation) -> None:
    gate = torch.tensor([88.5, -88.5, -200.0, 3e38, -3e38, 1e-38, 0.0, -0.0])
    both = torch.cat((gate, torch.ones(8)))[None]
    torch.testing.assert_close(gated(both, act).double(), formula(both, act), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_nan_of_either_half_is_nan_and_only_there(act: Activation) -> None:
    both = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    clean = gated(both, act)
    both[1, 4] = both[1, 20 + 9] = torch.nan
    out = gated(both, act)
    bad = torch.zeros(3, 20, dtype=torch.bool)
    bad[1, 4] = bad[1, 9] = True
    assert bool(out[bad].isnan().all())
    assert torch.equal(out[~bad], clean[~bad])


def test_the_exponential_is_exact_to_a_few_units_of_the_last_place() -> None:
    gate = torch.linspace(-87, 87, 100_001)
    found = gated(torch.cat((gate, torch.ones_like(gate)))[None], Silu())[0].double()
    exact = torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(found, exact, rtol=4e-7, atol=0)
