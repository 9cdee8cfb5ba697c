from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_api.plan import even_fractions
from moe_worker.expert.routing_table import RoutingTable


def slots(*ranks: list[int]) -> np.ndarray:
    return np.asarray([list(ranks)], dtype=np.int32)


def send(table: RoutingTable, counts: torch.Tensor, ids: list[int], shift: int = 0) -> list[int]:
    """Map one-choice tokens and advance the counts, as a committed step does."""
    physical, chosen = table.to_physical(0, torch.tensor(ids).reshape(-1, 1), counts, shift)
    counts += chosen
    return physical.reshape(-1).tolist()


def test_an_expert_goes_to_the_slot_that_holds_it() -> None:
    table = RoutingTable.build(
        slots([2, 0, -1], [3, 1, -1]), even_fractions(slots([2, 0, -1], [3, 1, -1])), 4
    )
    assert send(table, torch.zeros(4, dtype=torch.int64), [0, 1, 2, 3]) == [1, 4, 0, 3]


def test_ids_that_name_no_expert_go_nowhere_and_are_not_counted() -> None:
    placement = slots([0, 1], [1, 2])
    table = RoutingTable.build(placement, even_fractions(placement), 3)
    ids = torch.tensor([[0, -1], [3, 2], [2**31 - 1, -7]])
    physical, chosen = table.to_physical(0, ids, torch.zeros(3, dtype=torch.int64), 0)
    assert physical.tolist() == [[0, -1], [-1, 3], [-1, -1]]
    assert chosen.tolist() == [1, 0, 1]


@settings(max_examples=40)
@given(
    shares=st.lists(st.integers(0, 10), min_size=2, max_size=4).filter(lambda s: sum(s) > 0),
    pieces=st.lists(st.integers(1, 40), min_size=1, max_size=200),
    shift=st.integers(0, 7),
)
def test_copies_get_their_shares_in_batches_of_any_size(
    shares: list[int], pieces: list[int], shift: int
) -> None:
    placement = slots(*([[0]] * len(shares)))
    fractions = np.asarray(shares, dtype=np.float64).reshape(1, -1, 1) / sum(shares)
    table = RoutingTable.build(placement, fractions, 1)
    counts = torch.zeros(1, dtype=torch.int64)
    sent = [physical for piece in pieces for physical in send(table, counts, [0] * piece, shift)]
    got = np.bincount(sent, minlength=len(shares))
    # The discrepancy of the golden sequence grows with the logarithm of its length.
    slack = 2 + 2 * np.log2(1 + len(sent))
    assert np.all(np.abs(got - fractions.ravel() * len(sent)) <= slack), (got, fractions)
    assert all(got[copy] == 0 for copy, share in enumerate(shares) if share == 0)


def test_the_choice_does_not_depend_on_how_tokens_are_batched() -> None:
    placement = slots([0, 1], [0, -1], [0, 1])
    table = RoutingTable.build(placement, even_fractions(placement), 2)
    ids = torch.randint(0, 2, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    counts = torch.zeros(2, dtype=torch.int64)
    one_by_one = [send(table, counts, [expert])[0] for expert in ids]
    assert send(table, torch.zeros(2, dtype=torch.int64), ids) == one_by_one


def test_ranks_do_not_all_begin_with_the_same_copy() -> None:
    placement = slots([0], [0], [0])
    table = RoutingTable.build(placement, even_fractions(placement), 1)
    first = {send(table, torch.zeros(1, dtype=torch.int64), [0], shift)[0] for shift in range(8)}
    assert first == {0, 1, 2}


def test_layers_have_their_own_copies() -> None:
    placement = np.asarray([[[0, 1], [2, -1]], [[2, 0], [1, 0]]], dtype=np.int32)
    table = RoutingTable.build(placement, even_fractions(placement), 3)
    assert table.has_copies_L == (False, True)
    ids = torch.tensor([[0], [1], [2]])
    counts = torch.zeros(3, dtype=torch.int64)
    assert table.to_physical(0, ids, counts, 0)[0].tolist() == [[0], [1], [2]]
    assert table.to_physical(1, ids, counts, 0)[0].reshape(-1).tolist()[1:] == [2, 0]


def test_an_expert_without_a_slot_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layer 0: no slot holds experts \[1\]"):
        RoutingTable.build(slots([0], [2]), even_fractions(slots([0], [2])), 3)


def test_a_stranger_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"experts \[5\], the model has 0 to 1"):
        RoutingTable.build(slots([0, 1], [5, -1]), even_fractions(slots([0, 1], [5, -1])), 2)
