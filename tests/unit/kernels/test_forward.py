"""A whole model in one call: the bits of its ends around its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels import forward as contract
from moe_kernels.forward import Ends, composed, forward
from moe_kernels.head import Embedding, Head
from moe_kernels.implementation import Name
from moe_kernels.kv_formats import KvFormatName
from moe_kernels.stack import Stack
from moe_kernels.step_tokens import StepTokens
from tests.support.stack_layers import (
    BLOCK,
    BLOCKS_EACH,
    DIM,
    HIDDEN,
    Made,
    assert_same,
    assert_same_pages,
    on_other_pages,
)

# A first run compiles all that is compared, which takes minutes on a busy machine.
pytestmark = [pytest.mark.usefixtures("implementation"), pytest.mark.timeout(1200)]

VOCABULARY, POSITIONS = 50, BLOCK * BLOCKS_EACH
KINDS = st.fixed_dictionaries(
    {
        "window": st.sampled_from([None, 5, 17]),
        "sinks": st.booleans(),
        "heads": st.sampled_from([2, 4]),
        "shared": st.booleans(),
        "gated": st.booleans(),
        "multiplier": st.sampled_from([1.0, 0.3]),
    }
)
Span = tuple[int, int]


def ends_of(made: Made, multiplier: float = 1.0, divisor: float = 1.0) -> Ends:
    angles = made.normal(POSITIONS, DIM // 2, dtype=torch.float32)
    rows_VH = made.normal(VOCABULARY, HIDDEN)
    return Ends(
        Embedding(made.normal(VOCABULARY, HIDDEN), multiplier),
        angles.cos(),
        angles.sin(),
        Head(1 + made.normal(HIDDEN), 1e-5, rows_VH, divisor),
    )


def a_step(spans: list[Span], sampled: list[int], seed: int = 0) -> StepTokens:
    """By sequence, the position of its first token and how many."""
    num_tokens = sum(count for _, count in spans)
    tables = [[4 * at + seq for at in range(BLOCKS_EACH)] for seq in range(len(spans))]
    return StepTokens(
        ids=np.random.default_rng(seed).integers(0, VOCABULARY, num_tokens),
        spans_SC=np.array([(*span, BLOCKS_EACH) for span in spans], np.int64).reshape(-1, 3),
        blocks=np.array(tables, np.int64).reshape(-1),
        sample_rows=np.array(sampled, np.int64),
        block_size=BLOCK,
    )


@given(data=st.data(), seed=st.integers(0, 999), kv=st.sampled_from(["nvfp4", "bf16", "fp32"]))
@settings(max_examples=30, deadline=None)
def test_one_call_gives_the_bits_of_its_parts(
    data: st.DataObject, seed: int, kv: KvFormatName
) -> None:
    made, top_k, with_bias = Made(seed), data.draw(st.integers(1, 4)), data.draw(st.booleans())
    kinds = data.draw(st.lists(KINDS, min_size=1, max_size=4))
    ends = ends_of(made, *data.draw(st.sampled_from([(1.0, 1.0), (12.0, 8.0)])))
    stack = Stack(tuple(made.layer(kv, top_k, with_bias, **kind) for kind in kinds))
    other, turns = on_other_pages(stack, kv), np.arange(7, 7 + len(kinds))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=0, max_size=4))
    threads = torch.get_num_threads()
    try:
        # A prompt, its next piece, and decoding.
        for spans in (
            [(0, n) for n in lengths],
            [(n, data.draw(st.integers(0, 12))) for n in lengths],
            [(n + 12, 1) for n in lengths],
        ):
            torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
            num_tokens = sum(count for _, count in spans)
            sampled = st.lists(st.integers(0, num_tokens - 1), max_size=num_tokens + 3)
            rows = data.draw(sampled) if num_tokens else []
            step = a_step(spans, rows, seed)
            found = forward(step, ends, stack, turns)
            assert found[0].shape == (len(rows), VOCABULARY)
            assert_same(found, composed(step, ends, other, turns))
    finally:
        torch.set_num_threads(threads)
    assert_same_pages(stack, other)


def test_a_block_must_be_one_of_all_layers() -> None:
    made = Made(3)
    stack = Stack((made.layer("bf16"), made.layer("bf16", blocks=5)))
    ends, turns, step = ends_of(made), np.array([1, 2]), a_step([(0, 20)], [8])
    step = replace(step, blocks=np.array([3, 4]))
    found = forward(step, ends, stack, turns)
    assert_same(found, composed(step, ends, on_other_pages(stack, "bf16"), turns))
    with pytest.raises(IndexError):
        forward(replace(step, blocks=np.array([3, 5])), ends, stack, turns)


WRONG: dict[str, tuple[dict[str, list[Any]], str]] = {
    "a token past the vocabulary": ({"ids": [VOCABULARY, 1]}, "index|token ids"),
    "a token before the first": ({"ids": [1, -VOCABULARY - 1]}, "index|token ids"),
    "a table that is too short": ({"spans_SC": [[15, 2, 1]], "blocks": [0]}, "do not reach 17"),
    "a position past the last": (
        {"spans_SC": [[31, 2, 3]], "blocks": [0, 1, 2]}, "index",
    ),
    "a block past the pages": ({"blocks": [8, 1]}, "index|slots|block"),
    "a block that is not yet reached past the pages": ({"blocks": [0, 8]}, "block 8 is none"),
    "a block before the first": ({"blocks": [-9, 1]}, "index|slots"),
    "a sampled row past the tokens": ({"sample_rows": [2]}, "index|rows"),
    "a sampled row before the first": ({"sample_rows": [-3]}, "index|rows"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_exist_is_refused(what: str, implementation: Name) -> None:
    fields, message = WRONG[what]
    if implementation != "cpu" and what.startswith("a block that is not yet"):
        pytest.skip("others read no block that no token reaches")
    made = Made(4)
    stack = Stack((made.layer("bf16"),))
    wrong = {name: np.array(numbers, np.int64) for name, numbers in fields.items()}
    with pytest.raises(IndexError, match=message):
        forward(replace(a_step([(0, 2)], [1]), **wrong), ends_of(made), stack, np.zeros(1, int))


@pytest.mark.parametrize("probed", [[], [0], [1], [2], [0, 2]])
@pytest.mark.parametrize("spans", [[(3, 1)], [(0, 12), (5, 1)]])
def test_a_probe_sees_what_it_sees_of_the_parts(
    probed: list[int], spans: list[Span], implementation: Name, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for several at a time the one call is made, which results alone would not tell."""
    made, calls = Made(5), []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return composed(*args)

    monkeypatch.setattr(contract, "composed", counted)
    stack = Stack(tuple(made.layer("nvfp4", window=window) for window in (None, 5, None)))
    other, ends, turns = on_other_pages(stack, "nvfp4"), ends_of(made), np.arange(3)
    for layer in probed:
        stack.layers[layer].pages.probe.wanted = other.layers[layer].pages.probe.wanted = True
    step = a_step(spans, [0])
    assert_same(forward(step, ends, stack, turns), composed(step, ends, other, turns))
    assert_same_pages(stack, other)
    for number, (one, two) in enumerate(zip(stack.layers, other.layers, strict=True)):
        assert one.pages.probe.relative_error == two.pages.probe.relative_error
        assert (one.pages.probe.relative_error is not None) == (number in probed)
        assert not one.pages.probe.wanted
    assert bool(calls) == (implementation != "cpu" or len(probed) > 1)


def test_ends_that_store_other_numbers_than_each_other_are_computed() -> None:
    made = Made(6)
    stack, ends = Stack((made.layer("bf16"),)), ends_of(made)
    wide = replace(ends, embedding=Embedding(ends.embedding.rows_VH.float()))
    step = a_step([(0, 3)], [2])
    found = forward(step, wide, stack, np.zeros(1, int))
    assert_same(found, forward(step, ends, on_other_pages(stack, "bf16"), np.zeros(1, int)))
