from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_worker.expert.router import choose_experts


def test_equal_scores_go_to_the_lowest_ids() -> None:
    ids, weights = choose_experts(torch.zeros((3, 8)), 3, renormalise=True)
    assert ids.tolist() == [[0, 1, 2]] * 3
    assert torch.equal(weights, torch.full((3, 3), 0.125) / 0.375)


def test_weights_are_the_softmax_over_all_experts_and_renormalised_on_request() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    ids, weights = choose_experts(logits, 2, renormalise=False)
    assert ids.tolist() == [[1, 2]]
    assert torch.allclose(weights, torch.softmax(logits, dim=1)[:, [1, 2]])
    _, renormalised = choose_experts(logits, 2, renormalise=True)
    assert renormalised.sum().item() == pytest.approx(1.0)


@given(st.integers(0, 1000), st.integers(1, 5), st.sampled_from([1, 2, 4]))
def test_a_token_chooses_the_same_alone_and_among_others(seed: int, row: int, top_k: int) -> None:
    logits = torch.randn((67, 12), generator=torch.Generator().manual_seed(seed))
    ids, weights = choose_experts(logits, top_k, renormalise=True)
    alone = choose_experts(logits[row : row + 1], top_k, renormalise=True)
    assert torch.equal(alone[0], ids[row : row + 1])
    assert torch.equal(alone[1], weights[row : row + 1])


@pytest.mark.parametrize("top_k", [0, 9])
def test_top_k_out_of_range_is_refused(top_k: int) -> None:
    with pytest.raises(ValueError, match="top_k"):
        choose_experts(torch.zeros((1, 8)), top_k, renormalise=True)


def test_no_tokens() -> None:
    ids, weights = choose_experts(torch.zeros((0, 8)), 2, renormalise=True)
    assert ids.shape == weights.shape == (0, 2)
