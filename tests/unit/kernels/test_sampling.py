"""Choosing tokens: greedy ties, nucleus, and noise that is a function of seed and position."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from moe_kernels.sampling import NonFiniteLogits, sample, uniform

PROBABILITIES = [0.5, 0.25, 0.15, 0.1]
DRAWS = 4000


def draw_many(logits: list[float], temperature: float, top_p: float, seed: int = 1) -> Counter[int]:
    rows = torch.tensor([logits]).expand(DRAWS, -1)
    tokens = sample(
        rows, [temperature] * DRAWS, [top_p] * DRAWS, [seed] * DRAWS, list(range(DRAWS))
    )
    return Counter(tokens.tolist())


def greedy(logits: Tensor) -> list[int]:
    rows = len(logits)
    picked: list[int] = sample(logits, [0.0] * rows, [1.0] * rows, [0] * rows, [0] * rows).tolist()
    return picked


def test_greedy_takes_the_largest_and_the_lowest_id_on_ties() -> None:
    assert greedy(torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 5.0], [-2.0, -1.0, -1.0]])) == [1, 0, 1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_probabilities(temperature: float) -> None:
    counts = draw_many([math.log(p) for p in PROBABILITIES], temperature, 1.0)
    tempered = [p ** (1 / temperature) for p in PROBABILITIES]
    for token, weight in enumerate(tempered):
        expected = weight / sum(tempered)
        tolerance = 4 * math.sqrt(expected * (1 - expected) / DRAWS)
        assert abs(counts[token] / DRAWS - expected) <= tolerance


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.5, 1), (0.51, 2), (0.8, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    shuffled = [2, 0, 3, 1]
    logits = [0.0] * 4
    for place, token in enumerate(shuffled):
        logits[token] = math.log(PROBABILITIES[place])
    assert set(draw_many(logits, 1.0, top_p)) == set(shuffled[:kept])


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(9, 101, generator=torch.Generator().manual_seed(0))
    temperature = [0.0, 0.7, 1.0, 1.3, 0.0, 1.0, 2.0, 1.0, 0.9]
    top_p = [1.0, 0.9, 0.5, 1.0, 1.0, 0.99, 0.8, 1.0, 0.3]
    seeds, positions = list(range(40, 49)), list(range(9))
    together = sample(logits, temperature, top_p, seeds, positions).tolist()
    alone = [
        int(sample(logits[[i]], [temperature[i]], [top_p[i]], [seeds[i]], [positions[i]]))
        for i in range(9)
    ]
    assert alone == together


def test_noise_changes_with_seed_and_position_and_is_even() -> None:
    assert uniform(7, 3) == uniform(7, 3)
    table = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert len(set(table)) == len(table)
    assert all(0.0 <= u < 1.0 for u in table)
    assert abs(sum(table) / len(table) - 0.5) < 4 / math.sqrt(12 * len(table))
    assert 0.0 <= uniform(-1, 2**40) < 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(NonFiniteLogits, match=r"rows \[1\]"):
        greedy(torch.tensor([[0.0, 1.0], [bad, 0.0]]))


def test_a_masked_token_is_never_drawn() -> None:
    assert set(draw_many([0.0, -math.inf, 0.0], 1.0, 1.0)) == {0, 2}
