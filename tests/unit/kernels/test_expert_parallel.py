"""A layer between exchanges, in three calls: the bits of the operations that they are made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels.bins import BinLayout, Bins, ForeignSlot
from moe_kernels.copies import Copies
from moe_kernels.expert_parallel import (
    Dispatched,
    Served,
    combine_rows,
    composed_combine,
    composed_dispatch,
    composed_serve,
    dispatch_rows,
    serve_rows,
)
from moe_kernels.kv_formats import KvFormatName
from moe_kernels.stack import Stack
from tests.support.stack_layers import (
    EXPERTS,
    HIDDEN,
    SLOTS,
    Made,
    a_step,
    assert_same_pages,
    on_other_pages,
)

# A first run compiles all that is compared, which takes minutes on a busy machine.
pytestmark = [pytest.mark.usefixtures("implementation"), pytest.mark.timeout(1200)]

OWN, PEER = 0, 1
BIN_R = [0, 2]
"""Bin 1 is what the peer sends, see `Dispatcher`."""
KINDS = st.fixed_dictionaries(
    {
        "window": st.sampled_from([None, 5]),
        "shared": st.booleans(),
        "gated": st.booleans(),
        "with_bias": st.booleans(),
        "multiplier": st.sampled_from([1.0, 0.3]),
    }
)


def on_two_ranks(stack: Stack) -> Stack:
    """Experts 0, 2 and 4 have copies on both ranks, the others on one of them."""
    physical_EC = torch.tensor(
        [[e, SLOTS + e] if e % 2 == 0 else [SLOTS + e, -1] for e in range(EXPERTS)]
    )
    whole = 1 << 32
    edges_EC = torch.tensor([[whole // 3 if e % 2 == 0 else whole, whole] for e in range(EXPERTS)])
    copies = Copies(physical_EC, edges_EC, torch.arange(EXPERTS) * 12345678901234567)
    return Stack(tuple(replace(layer, copies=copies) for layer in stack.layers))


def some_bins(num_tokens: int, top_k: int) -> Bins:
    bins = Bins.allocate(
        3, num_tokens, BinLayout(HIDDEN, top_k, torch.bfloat16), torch.device("cpu")
    )
    bins.memory.zero_()
    return bins


def assert_equal(found: Dispatched | Served, expected: Dispatched | Served) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(ours, Tensor):
            assert isinstance(theirs, Tensor)
            assert torch.equal(ours, theirs)
        else:
            assert np.array_equal(ours, theirs)


@given(
    data=st.data(),
    kind=KINDS,
    seed=st.integers(0, 999),
    kv=st.sampled_from(["nvfp4", "bf16"]),
    top_k=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 12), max_size=4),
)
@settings(max_examples=30, deadline=None)
def test_each_call_gives_the_bits_of_its_parts(
    data: st.DataObject,
    kind: dict[str, object],
    seed: int,
    kv: KvFormatName,
    top_k: int,
    lengths: list[int],
) -> None:
    made = Made(seed)
    layers = [made.layer(kv, top_k, **kind) for _ in range(2)]  # type: ignore[arg-type]
    stack = on_two_ranks(Stack(tuple(layers)))
    other, number = on_other_pages(stack, kv), data.draw(st.integers(0, 1))
    step = a_step(made, [(0, n) for n in lengths])
    x_TH = made.normal(len(step.slots_T), HIDDEN, dtype=torch.float32)
    num_tokens = len(x_TH)
    ours, theirs = some_bins(1 + num_tokens, top_k), some_bins(1 + num_tokens, top_k)

    sent = dispatch_rows(x_TH, stack, number, step, 7, ours, SLOTS, BIN_R)
    assert_equal(sent, composed_dispatch(x_TH, other, number, step, 7, theirs, SLOTS, BIN_R))
    assert torch.equal(ours.memory, theirs.memory)
    assert_same_pages(stack, other)

    # What went to the peer comes from it, as well.
    sources = data.draw(st.sampled_from([[(0, num_tokens), (2, num_tokens)], [(2, num_tokens)]]))
    served = serve_rows(ours, sources, stack, number)
    assert_equal(served, composed_serve(ours, sources, other, number))
    assert served.served_S.sum() == sum(served.pairs_Q)

    own_NH = made.normal(sent.pairs_R[OWN], HIDDEN, dtype=torch.float32)
    back_NH = made.normal(3 + sent.pairs_R[PEER], HIDDEN, dtype=torch.float32)
    given_rows = (sent, SLOTS, OWN, own_NH, back_NH, [0, 3])
    found = combine_rows(*given_rows, stack, number)
    assert torch.equal(found, composed_combine(*given_rows, other, number))


def test_slots_that_this_rank_has_not_are_refused() -> None:
    made = Made(3)
    stack = on_two_ranks(Stack((made.layer("bf16"),)))
    bins = some_bins(1, 2)
    bins.memory[0].view(torch.int32)[:2] = torch.tensor([SLOTS, -1], dtype=torch.int32)
    with pytest.raises(ForeignSlot, match=f"past the {SLOTS} here"):
        serve_rows(bins, [(0, 1)], stack, 0)
