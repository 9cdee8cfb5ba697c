"""Norm, gate and choice in one call: bit for bit the single operations of the same kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels.gate import Gate, route
from moe_kernels.linear import linear
from moe_kernels.norm_rope import rms_norm
from moe_kernels.router import ExpertGroups, RouterSpec, choose_experts

pytestmark = pytest.mark.usefixtures("implementation")

SPECS = [
    RouterSpec(12, 3),
    RouterSpec(12, 2, score="softmax_topk", logit_bias=True),
    RouterSpec(12, 4, "sigmoid", bias_for_selection=True, groups=ExpertGroups(4, 2, "top2sum"),
               renorm_epsilon=1e-20, scale=2.5),
    RouterSpec(12, 1, groups=ExpertGroups(3, 1), renorm=False, scale=16.0),
]  # fmt: skip


def a_gate(spec: RouterSpec, hidden: int, dtype: torch.dtype, seed: int = 0) -> Gate:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return Gate(
        spec,
        draw(hidden).to(torch.bfloat16),
        1e-6,
        draw(spec.num_experts, hidden).to(dtype),
        draw(spec.num_experts) if spec.logit_bias else None,
        draw(spec.num_experts) if spec.bias_for_selection else None,
    )


def one_by_one(x_TH: torch.Tensor, gate: Gate) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normed_TH = rms_norm(x_TH, gate.norm_H, gate.norm_eps)
    logits_TE = linear(normed_TH, gate.gate_EH)
    if gate.logit_bias_E is not None:
        logits_TE = logits_TE + gate.logit_bias_E
    return normed_TH, *choose_experts(logits_TE, gate.spec, gate.selection_bias_E)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(SPECS),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 40),
    st.integers(0, 999),
)
def test_in_one_call_the_same_bits(
    spec: RouterSpec, dtype: torch.dtype, num_tokens: int, seed: int
) -> None:
    gate = a_gate(spec, 37, dtype)
    x_TH = torch.randn(num_tokens, 37, generator=torch.Generator().manual_seed(seed))
    for got, wanted in zip(route(x_TH, gate), one_by_one(x_TH, gate), strict=True):
        assert torch.equal(got, wanted)
    if num_tokens:
        alone = route(x_TH[-1:], gate)
        for got, wanted in zip(alone, one_by_one(x_TH, gate), strict=True):
            assert torch.equal(got[0], wanted[-1])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_threads_share_tokens_or_rows_of_the_gate(num_tokens: int) -> None:
    spec = RouterSpec(600, 8)
    gate = a_gate(spec, 512, torch.bfloat16)
    x_TH = torch.randn(num_tokens, 512, generator=torch.Generator().manual_seed(1))
    with_two = route(x_TH, gate)
    torch.set_num_threads(1)
    for got, wanted in zip(route(x_TH, gate), with_two, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    gate = a_gate(SPECS[0], 32, torch.bfloat16)
    x_TH = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    clean = route(x_TH, gate)
    x_TH[3, 4] = bad
    _, ids_TK, weights_TK = route(x_TH, gate)
    others = [0, 1, 2, 4]
    assert torch.equal(ids_TK[others], clean[1][others])
    assert torch.equal(weights_TK[others], clean[2][others])
    assert len(set(ids_TK[3].tolist())) == 3
    assert bool(weights_TK[3].isnan().all())
