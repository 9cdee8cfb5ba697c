"""Whole layers in one call: the bits of their halves one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels.activation import SILU, SwigluOai
from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.attention_step import AttentionStep
from moe_kernels.copies import Copies
from moe_kernels.experts import Experts
from moe_kernels.gate import Gate
from moe_kernels.grouped_query import GroupedQueryLayer
from moe_kernels.kv_formats import HeadsShape, KvFormat, KvFormatName
from moe_kernels.kv_pages import KvPages, allocate_pages
from moe_kernels.mlp import Mlp
from moe_kernels.router import RouterSpec
from moe_kernels.stack import Passed, Stack, StackLayer, composed, run_stack

# A first run compiles all that is compared, which takes minutes on a busy machine.
pytestmark = [pytest.mark.usefixtures("implementation"), pytest.mark.timeout(1200)]

HIDDEN, HEADS, DIM, EXPERTS, SLOTS, INTERMEDIATE = 48, 2, 32, 6, 8, 24
BLOCK, BLOCKS_EACH = 16, 2
NO_TURN = np.zeros(1, np.int64)
KINDS = st.fixed_dictionaries(
    {
        "window": st.sampled_from([None, 5]),
        "shared": st.booleans(),
        "gated": st.booleans(),
        "multiplier": st.sampled_from([1.0, 0.3]),
    }
)


class Made:
    """The same tensors of the same seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * shape[-1] ** -0.5).to(dtype)

    def layer(
        self,
        kv: KvFormatName,
        top_k: int = 2,
        with_bias: bool = False,
        window: int | None = None,
        shared: bool = False,
        gated: bool = False,
        multiplier: float = 1.0,
    ) -> StackLayer:
        act = SwigluOai() if with_bias else SILU
        attention = GroupedQueryLayer(
            HEADS,
            HEADS,
            DIM,
            1e-5,
            norm_H=1 + self.normal(HIDDEN),
            qkv_QH=4 * self.normal(3 * HEADS * DIM, HIDDEN),
            o_HQ=self.normal(HIDDEN, HEADS * DIM),
            window=window,
        )
        gate = Gate(
            RouterSpec(EXPERTS, top_k),
            1 + self.normal(HIDDEN),
            1e-5,
            4 * self.normal(EXPERTS, HIDDEN),
        )
        # Two experts have a second copy.
        physical_EC = torch.tensor(
            [[e, EXPERTS + e if e < SLOTS - EXPERTS else -1] for e in range(6)]
        )
        whole = 1 << 32
        edges_EC = torch.tensor([[whole // 3 if e < 2 else whole, whole] for e in range(6)])
        experts = Experts(
            self.normal(SLOTS, 2 * INTERMEDIATE, HIDDEN),
            self.normal(SLOTS, HIDDEN, INTERMEDIATE),
            act,
            self.normal(SLOTS, 2 * INTERMEDIATE) if with_bias else None,
            self.normal(SLOTS, HIDDEN) if with_bias else None,
        )
        gate_1H = self.normal(1, HIDDEN) if gated else None
        network = Mlp(self.normal(2 * 16, HIDDEN), self.normal(HIDDEN, 16), act, gate_1H)
        return StackLayer(
            attention,
            pages(kv),
            gate,
            Copies(physical_EC, edges_EC, torch.arange(EXPERTS) * 12345678901234567),
            torch.arange(EXPERTS) * 3,
            experts,
            network if shared else None,
            multiplier,
        )


def pages(kv: KvFormatName) -> KvPages:
    return allocate_pages(KvFormat(kv), HeadsShape(HEADS, DIM), 4 * BLOCKS_EACH, BLOCK)


def on_other_pages(stack: Stack, kv: KvFormatName) -> Stack:
    fields = [{**vars(layer), "pages": pages(kv)} for layer in stack.layers]
    return Stack(tuple(StackLayer(**of) for of in fields))


def a_step(made: Made, spans: list[tuple[int, int]]) -> AttentionStep:
    """By sequence, the position of its first token and how many."""
    rows, slots = [], []
    for seq, (start, count) in enumerate(spans):
        table = [4 * place + seq for place in range(BLOCKS_EACH)]
        rows.append(AttentionRows(start, count, table))
        slots += [table[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, start + count)]
    angles = made.normal(len(slots), DIM // 2, dtype=torch.float32)
    plan = plan_attention(rows, BLOCK)
    return AttentionStep(angles.cos(), angles.sin(), torch.tensor(slots, dtype=torch.int64), plan)


def assert_same(found: Passed, expected: Passed) -> None:
    assert torch.equal(found.x_TH, expected.x_TH)
    assert torch.equal(found.chosen_LE, expected.chosen_LE)
    assert torch.equal(found.served_LS, expected.served_LS)
    assert found.num_strangers == expected.num_strangers == 0


@given(data=st.data(), seed=st.integers(0, 999), kv=st.sampled_from(["nvfp4", "bf16", "fp32"]))
@settings(max_examples=30, deadline=None)
def test_one_call_gives_the_bits_of_its_parts(
    data: st.DataObject, seed: int, kv: KvFormatName
) -> None:
    made, top_k, with_bias = Made(seed), data.draw(st.integers(1, 4)), data.draw(st.booleans())
    kinds = data.draw(st.lists(KINDS, min_size=1, max_size=3))
    num_layers = len(kinds)
    stack = Stack(tuple(made.layer(kv, top_k, with_bias, **kind) for kind in kinds))
    other = on_other_pages(stack, kv)
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    threads = torch.get_num_threads()
    try:
        for spans in ([(0, n) for n in lengths], [(n, 1) for n in lengths]):
            torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
            step = a_step(made, spans)
            x_TH = made.normal(len(step.slots_T), HIDDEN, dtype=torch.float32)
            before, turns = x_TH.clone(), np.arange(7, 7 + num_layers)
            found = run_stack(x_TH, stack, step, turns)
            assert_same(found, composed(x_TH, other, step, turns))
            assert torch.equal(x_TH, before)
    finally:
        torch.set_num_threads(threads)
    for ours, theirs in zip(stack.layers, other.layers, strict=True):
        for stored, written in zip(ours.pages.tensors, theirs.pages.tensors, strict=True):
            assert torch.equal(stored.view(torch.uint8), written.view(torch.uint8))


def test_a_step_without_tokens_passes() -> None:
    made = Made(1)
    stack = Stack((made.layer("bf16"),))
    empty = torch.empty((0, HIDDEN))
    found = run_stack(empty, stack, a_step(made, []), NO_TURN)
    assert found.x_TH.shape == (0, HIDDEN)
    assert found.chosen_LE.sum() == found.served_LS.sum() == 0


def test_numbers_written_later_are_used() -> None:
    """Of a slot's weights and of the counts, which the stack keeps by their places."""
    made = Made(2)
    layer = made.layer("bf16")
    stack, step = Stack((layer,)), a_step(made, [(0, 5)])
    x_TH = made.normal(5, HIDDEN, dtype=torch.float32)
    first = run_stack(x_TH, stack, step, NO_TURN)
    layer.experts.w2_SHI.mul_(2)
    layer.sent_E.add_(1)
    second = run_stack(x_TH, stack, step, NO_TURN)
    assert not torch.equal(first.x_TH, second.x_TH)
    assert_same(second, composed(x_TH, on_other_pages(stack, "bf16"), step, NO_TURN))
