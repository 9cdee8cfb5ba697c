"""The experts half of a layer in one call: the bits of the single operations."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels.activation import SILU, Activation, SwigluOai, gated, sigmoid_scaled
from moe_kernels.experts import Experts, add_experts
from moe_kernels.grouped_gemm import expert_mlp
from moe_kernels.linear import linear
from moe_kernels.mlp import Mlp, add_mlp, mlp
from moe_kernels.permute import sort_by_slot

pytestmark = pytest.mark.usefixtures("implementation")

SLOTS, HIDDEN, INTERMEDIATE = 5, 40, 28


class Layer(NamedTuple):
    experts: Experts
    shared: Mlp | None


def a_layer(
    dtype: torch.dtype,
    *,
    shared: bool = False,
    gate: bool = False,
    bias: bool = False,
    act: Activation = SILU,
    slots: int = SLOTS,
    hidden: int = HIDDEN,
) -> Layer:
    generator = torch.Generator().manual_seed(9)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / hidden**0.5).to(dtype)

    experts = Experts(
        draw(slots, 2 * INTERMEDIATE, hidden),
        draw(slots, hidden, INTERMEDIATE),
        act,
        draw(slots, 2 * INTERMEDIATE) if bias else None,
        draw(slots, hidden) if bias else None,
    )
    network = Mlp(draw(2 * 19, hidden), draw(hidden, 19), act, draw(1, hidden) if gate else None)
    return Layer(experts, network if shared else None)


def dense(x_TH: Tensor, weights: Mlp) -> Tensor:
    out_TH = linear(gated(linear(x_TH, weights.w13_2IH), weights.act), weights.w2_HI)
    if weights.gate_1H is None:
        return out_TH
    return sigmoid_scaled(out_TH, linear(x_TH, weights.gate_1H))


def one_by_one(
    onto_TH: Tensor | None, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, layer: Layer,
    multiplier: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    experts, top_k = layer.experts, slots_TK.shape[1]
    order_P, offsets = sort_by_slot(slots_TK, len(experts.w2_SHI))
    y_PH = torch.zeros(slots_TK.numel(), x_TH.shape[1])
    y_PH[order_P] = expert_mlp(
        x_TH[order_P // top_k], offsets, experts.w13_S2IH, experts.w2_SHI, act=experts.act,
        b13_S2I=experts.b13_S2I, b2_SH=experts.b2_SH,
    )  # fmt: skip
    total_TH = torch.zeros_like(x_TH)
    for choice in range(top_k):
        total_TH = total_TH + y_PH[choice::top_k] * weights_TK[:, choice, None]
    if layer.shared is not None:
        total_TH = total_TH + dense(x_TH, layer.shared)
    total_TH = total_TH * multiplier
    return total_TH if onto_TH is None else onto_TH + total_TH, offsets.diff()


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is added to, rows, slots (some of them none) and weights."""
    num_tokens, top_k = draw(st.integers(0, 20)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99999)))
    low, high = draw(st.sampled_from([(0, SLOTS), (-1, SLOTS + 1), (2, 3)]))
    return (
        torch.randn(num_tokens, HIDDEN, generator=generator),
        torch.randn(num_tokens, HIDDEN, generator=generator),
        torch.randint(low, high, (num_tokens, top_k), generator=generator),
        torch.rand(num_tokens, top_k, generator=generator),
    )


@settings(deadline=None, max_examples=60)
@given(
    batches(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([{}, {"shared": True}, {"shared": True, "gate": True}, {"bias": True}]),
    st.sampled_from([SILU, SwigluOai()]),
    st.sampled_from([1.0, 0.22]),
    st.booleans(),
)
def test_in_one_call_the_same_bits(
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    dtype: torch.dtype,
    parts: dict[str, bool],
    act: Activation,
    multiplier: float,
    is_added: bool,
) -> None:
    onto_TH, x_TH, slots_TK, weights_TK = batch
    layer = a_layer(dtype, act=act, **parts)
    onto = onto_TH if is_added else None
    got = add_experts(
        onto, x_TH, slots_TK, weights_TK, layer.experts, shared=layer.shared, multiplier=multiplier
    )
    wanted = one_by_one(onto, x_TH, slots_TK, weights_TK, layer, multiplier)
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])
    assert got[1].dtype == torch.int64


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("num_tokens", [1, 3, 50])
def test_threads_and_company_do_not_matter(num_tokens: int) -> None:
    layer = a_layer(torch.bfloat16, shared=True, gate=True, slots=32, hidden=1600)
    generator = torch.Generator().manual_seed(3)
    x_TH = torch.randn(num_tokens, 1600, generator=generator)
    slots_TK = torch.randint(0, 32, (num_tokens, 4), generator=generator)
    weights_TK = torch.rand(num_tokens, 4, generator=generator)

    def run(rows: slice) -> Tensor:
        return add_experts(
            x_TH[rows], x_TH[rows], slots_TK[rows], weights_TK[rows], layer.experts,
            shared=layer.shared,
        )[0]  # fmt: skip

    with_two = run(slice(None))
    assert torch.equal(run(slice(num_tokens - 1, None)), with_two[-1:])
    torch.set_num_threads(1)
    assert torch.equal(run(slice(None)), with_two)


def test_weights_written_in_place_are_seen() -> None:
    """A slot gets another expert while the engine serves."""
    layer = a_layer(torch.bfloat16)
    x_TH, slots_TK = torch.ones(1, HIDDEN), torch.tensor([[3]])
    before, _ = add_experts(None, x_TH, slots_TK, torch.ones(1, 1), layer.experts)
    layer.experts.w2_SHI[3] *= 2
    after, _ = add_experts(None, x_TH, slots_TK, torch.ones(1, 1), layer.experts)
    assert torch.equal(after, before * 2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    layer = a_layer(torch.bfloat16, shared=True)
    x_TH = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(5))
    slots_TK, weights_TK = torch.tensor([[0, 1], [1, 2]] * 3), torch.ones(6, 2)

    def run() -> Tensor:
        return add_experts(
            x_TH, x_TH, slots_TK, weights_TK, layer.experts, shared=layer.shared
        )[0]  # fmt: skip

    clean = run()
    x_TH[2, 7] = bad
    out = run()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(out[others], clean[others])
    assert not bool(out[2].isfinite().any())


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 30),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.sampled_from([1.0, 0.22]),
)
def test_a_dense_network_in_one_call_has_the_same_bits(
    num_tokens: int, dtype: torch.dtype, gate: bool, multiplier: float
) -> None:
    network = a_layer(dtype, shared=True, gate=gate).shared
    assert network is not None
    generator = torch.Generator().manual_seed(num_tokens)
    onto_TH, x_TH = torch.randn(2, num_tokens, HIDDEN, generator=generator)
    wanted = dense(x_TH, network)
    assert torch.equal(mlp(x_TH, network), wanted)
    assert torch.equal(add_mlp(onto_TH, x_TH, network, multiplier), onto_TH + wanted * multiplier)
