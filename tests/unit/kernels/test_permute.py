"""Grouping pairs by slot: order, offsets, and ids that name no slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels.grouped_gemm import expert_mlp
from moe_kernels.permute import sort_by_slot
from tests.support.examples import examples

pytestmark = pytest.mark.usefixtures("implementation")

FAR = 2**31 - 1


@st.composite
def slot_tables(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    num_slots = draw(st.integers(1, 6))
    top_k = draw(st.integers(1, 4))
    ids = st.one_of(st.integers(-2, num_slots + 1), st.just(FAR))
    rows = draw(st.lists(st.lists(ids, min_size=top_k, max_size=top_k), max_size=12))
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, top_k), num_slots


@settings(max_examples=examples(100))
@given(slot_tables())
def test_order_is_the_stable_grouping_of_a_naive_loop(case: tuple[torch.Tensor, int]) -> None:
    slots_TK, num_slots = case
    flat = slots_TK.reshape(-1).tolist()
    order, offsets = sort_by_slot(slots_TK, num_slots)
    groups = [[i for i, slot in enumerate(flat) if slot == wanted] for wanted in range(num_slots)]
    assert order.tolist() == [index for group in groups for index in group]
    bounds = offsets.tolist()
    assert [bounds[s + 1] - bounds[s] for s in range(num_slots)] == [len(g) for g in groups]
    assert order.dtype == offsets.dtype == torch.int64


def test_c03_sentinel_and_out_of_range_ids_add_exactly_zero() -> None:
    """-1 means "not here"; 8 and 2147483647 are past the 8 experts."""
    slots_TK = torch.tensor([[2, -1], [7, 8], [FAR, 0]])
    generator = torch.Generator().manual_seed(3)
    x_TH = torch.randn(3, 32, generator=generator)
    w13 = torch.randn(8, 2 * 24, 32, generator=generator)
    w2 = torch.randn(8, 32, 24, generator=generator)
    weights_TK = torch.rand(3, 2, generator=generator)

    def routed(table_TK: torch.Tensor) -> torch.Tensor:
        order, offsets = sort_by_slot(table_TK, 8)
        pairs_PH = torch.zeros(table_TK.numel(), 32)
        pairs_PH[order] = expert_mlp(x_TH[order // 2], offsets, w13, w2)
        y_TKH = pairs_PH.view(3, 2, 32)
        return y_TKH[:, 0] * weights_TK[:, :1] + y_TKH[:, 1] * weights_TK[:, 1:]

    out_TH = routed(slots_TK)
    # The masked reference: each token's one valid expert alone, computed densely.
    for token, (choice, expert) in enumerate([(0, 2), (0, 7), (1, 0)]):
        gate, up = (w13[expert] @ x_TH[token]).chunk(2)
        dense = w2[expert] @ (torch.nn.functional.silu(gate) * up)
        torch.testing.assert_close(
            out_TH[token], dense * weights_TK[token, choice], rtol=1e-4, atol=1e-4
        )
    # Exactly zero: bit for bit what the same table gives with every stranger marked -1.
    masked_TK = torch.where((slots_TK >= 0) & (slots_TK < 8), slots_TK, -1)
    assert torch.equal(out_TH, routed(masked_TK))
    assert len(sort_by_slot(slots_TK, 8)[0]) == 3
