"""Whole layers in one call: the bits of their halves one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels.kv_formats import KvFormatName
from moe_kernels.stack import Stack, composed, run_stack
from tests.support.stack_layers import (
    HIDDEN,
    Made,
    a_step,
    assert_same,
    assert_same_pages,
    on_other_pages,
)

# A first run compiles all that is compared, which takes minutes on a busy machine.
pytestmark = [pytest.mark.usefixtures("implementation"), pytest.mark.timeout(1200)]

NO_TURN = np.zeros(1, np.int64)
KINDS = st.fixed_dictionaries(
    {
        "window": st.sampled_from([None, 5]),
        "shared": st.booleans(),
        "gated": st.booleans(),
        "multiplier": st.sampled_from([1.0, 0.3]),
    }
)


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
    assert_same_pages(stack, other)


def test_a_step_without_tokens_passes() -> None:
    made = Made(1)
    stack = Stack((made.layer("bf16"),))
    empty = torch.empty((0, HIDDEN))
    x_TH, counts = run_stack(empty, stack, a_step(made, []), NO_TURN)
    assert x_TH.shape == (0, HIDDEN)
    assert counts.chosen_LE.sum() == counts.served_LS.sum() == 0


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
    assert not torch.equal(first[0], second[0])
    assert_same(second, composed(x_TH, on_other_pages(stack, "bf16"), step, NO_TURN))
