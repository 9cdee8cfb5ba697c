"""Copies of chosen experts: a plain loop in whole numbers of Python is the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels.copies import GOLDEN, POINT_BITS, Copies, place_choices

pytestmark = pytest.mark.usefixtures("implementation")

WHOLE = 1 << POINT_BITS


@st.composite
def layers(draw: st.DrawFn) -> Copies:
    """Of experts with different numbers of copies, some of them without a share."""
    num_experts, most = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    physical, edges = [], []
    for expert in range(num_experts):
        count = draw(st.integers(1, most))
        inner = sorted(
            draw(st.lists(st.integers(0, WHOLE), min_size=count - 1, max_size=count - 1))
        )
        physical.append([expert * most + copy for copy in range(count)] + [-1] * (most - count))
        edges.append(inner + [WHOLE] * (most - count + 1))
    starts = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=num_experts, max_size=num_experts)
    return Copies(torch.tensor(physical), torch.tensor(edges), torch.tensor(draw(starts)))


def naive(ids: list[list[int]], copies: Copies, sent: list[int], turn: int) -> list[list[int]]:
    num_experts = len(sent)
    total = [sum(row.count(expert) for row in ids) for expert in range(num_experts)]
    earlier = [0] * num_experts
    placed = []
    for row in ids:
        placed.append([-1] * len(row))
        for choice, expert in enumerate(row):
            if 0 <= expert < num_experts:
                n = sent[expert] + (earlier[expert] + turn) % total[expert]
                wrapped = (n * GOLDEN + int(copies.start_E[expert])) % 2**64
                point = wrapped >> (64 - POINT_BITS)
                copy = sum(point >= edge for edge in copies.edges_EC[expert].tolist())
                placed[-1][choice] = int(copies.physical_EC[expert, copy])
                earlier[expert] += 1
    return placed


@settings(deadline=None, max_examples=80)
@given(layers(), st.data())
def test_every_choice_goes_where_the_plain_loop_sends_it(
    copies: Copies, data: st.DataObject
) -> None:
    num_experts, top_k = len(copies.start_E), data.draw(st.integers(1, 3))
    odd = st.one_of(st.integers(-2, num_experts), st.just(2**31 - 1))
    ids = data.draw(st.lists(st.lists(odd, min_size=top_k, max_size=top_k), max_size=12))
    sent = data.draw(st.lists(st.integers(0, 2**40), min_size=num_experts, max_size=num_experts))
    turn = data.draw(st.integers(0, 2**62 - 1))
    ids_TK = torch.tensor(ids, dtype=torch.int64).view(-1, top_k)
    physical_TK, chosen_E, strangers = place_choices(ids_TK, copies, torch.tensor(sent), turn)
    assert physical_TK.tolist() == naive(ids, copies, sent, turn)
    flat = ids_TK.flatten().tolist()
    assert chosen_E.tolist() == [flat.count(expert) for expert in range(num_experts)]
    assert strangers == sum(id != -1 and not 0 <= id < num_experts for id in flat)
    assert physical_TK.dtype == chosen_E.dtype == torch.int64
