"""Lengths are read, bounded and drawn."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_worker.bench.lengths import MAX_TOKENS, Lengths, parse_lengths

NUMBERS = st.integers(1, MAX_TOKENS)


@given(NUMBERS, NUMBERS, st.integers(0, 2**32))
def test_what_is_drawn_lies_within_and_what_is_shown_is_read_again(
    one: int, other: int, seed: int
) -> None:
    lengths = Lengths(min(one, other), max(one, other))
    assert parse_lengths(str(lengths)) == lengths
    assert lengths.least <= lengths.draw(random.Random(seed)) <= lengths.most


def test_both_ends_are_drawn() -> None:
    source = random.Random(3)
    assert {parse_lengths("uniform:4,6").draw(source) for _ in range(100)} == {4, 5, 6}
    assert {parse_lengths("5").draw(source) for _ in range(5)} == {5}


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "1.5", "uniform:9,3", "uniform:0,3", "uniform:1", "normal:1,2", "1000001"],
)
def test_anything_else_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=repr(text)):
        parse_lengths(text)
