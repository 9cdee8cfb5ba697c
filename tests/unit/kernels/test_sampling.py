"""Choosing tokens: greedy ties, nucleus, and noise that is a function of seed and position."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels import sampling
from moe_kernels.implementation import using
from moe_kernels.sampling import ONE, Cut, NonFiniteLogits, sample, uniform
from tests.support.examples import examples

pytestmark = pytest.mark.usefixtures("implementation")

PROBABILITIES = [0.5, 0.25, 0.15, 0.1]
DRAWS = 4000
MOST_DRAWS = 300


def draw_many(logits: list[float], cut: Cut, seed: int = 1) -> Counter[int]:
    rows = torch.tensor([logits]).expand(DRAWS, -1)
    tokens = sample(rows, [cut] * DRAWS, [seed] * DRAWS, list(range(DRAWS)))
    return Counter(tokens)


def greedy(logits: Tensor) -> list[int]:
    rows = len(logits)
    return sample(logits, [Cut()] * rows, [0] * rows, [0] * rows)


def test_greedy_takes_the_largest_and_the_lowest_id_on_ties() -> None:
    assert greedy(torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 5.0], [-2.0, -1.0, -1.0]])) == [1, 0, 1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_probabilities(temperature: float) -> None:
    counts = draw_many([math.log(p) for p in PROBABILITIES], Cut(temperature))
    tempered = [p ** (1 / temperature) for p in PROBABILITIES]
    for token, weight in enumerate(tempered):
        expected = weight / sum(tempered)
        tolerance = 4 * math.sqrt(expected * (1 - expected) / DRAWS)
        assert abs(counts[token] / DRAWS - expected) <= tolerance


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        (Cut(1.0, top_p=0.4), 1),
        (Cut(1.0, top_p=0.5), 1),
        (Cut(1.0, top_p=0.51), 2),
        (Cut(1.0, top_p=0.8), 3),
        (Cut(1.0, top_p=1.0), 4),
        (Cut(1.0, top_k=1), 1),
        (Cut(1.0, top_k=3), 3),
        (Cut(1.0, top_k=9), 4),
        (Cut(1.0, top_k=2, top_p=0.66), 1),  # 0.5 of 0.75 is more than 0.66
        (Cut(1.0, top_k=2, top_p=0.67), 2),
        (Cut(1.0, min_p=1.0), 1),
        (Cut(1.0, min_p=0.49), 2),
        (Cut(1.0, min_p=0.29), 3),
        (Cut(1.0, min_p=0.0), 4),
        (Cut(1.0, top_p=0.8, min_p=0.4), 2),
    ],
)
def test_cuts_keep_the_most_probable_tokens(cut: Cut, kept: int) -> None:
    shuffled = [2, 0, 3, 1]
    logits = [0.0] * 4
    for place, token in enumerate(shuffled):
        logits[token] = math.log(PROBABILITIES[place])
    assert set(draw_many(logits, cut)) == set(shuffled[:kept])


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(9, 101, generator=torch.Generator().manual_seed(0))
    temperature = [0.0, 0.7, 1.0, 1.3, 0.0, 1.0, 2.0, 1.0, 0.9]
    top_p = [1.0, 0.9, 0.5, 1.0, 1.0, 0.99, 0.8, 1.0, 0.3]
    top_k = [0, 5, 0, 50, 1, 0, 0, 7, 0]
    cuts = [Cut(t, k, p) for t, k, p in zip(temperature, top_k, top_p, strict=True)]
    seeds, positions = list(range(40, 49)), list(range(9))
    together = sample(logits, cuts, seeds, positions)
    alone = [sample(logits[[i]], [cuts[i]], [seeds[i]], [positions[i]])[0] for i in range(9)]
    assert alone == together


def test_noise_changes_with_seed_and_position_and_is_even() -> None:
    assert uniform(7, 3) == uniform(7, 3)
    table = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert len(set(table)) == len(table)
    assert all(0.0 <= u < 1.0 for u in table)
    assert abs(sum(table) / len(table) - 0.5) < 4 / math.sqrt(12 * len(table))
    assert 0.0 <= uniform(-1, 2**40) < 1.0


NO_NUMBERS = [math.nan, -math.nan, math.inf]


@pytest.mark.parametrize("bad", NO_NUMBERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    rows = torch.tensor([[0.0, 1.0], [bad, 0.0], [0.0, bad], [-math.inf, 0.0], [-math.inf] * 2])
    with pytest.raises(NonFiniteLogits, match=r"rows \[1, 2, 4\]") as caught:
        sample(rows, [Cut(temperature)] * 5, [0] * 5, [0] * 5)
    assert caught.value.rows == (1, 2, 4)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 7), [], [], []) == []


def test_zeros_of_both_signs_are_equal() -> None:
    assert greedy(torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]])) == [1, 1]
    assert set(draw_many([-0.0, 0.0, -1.0], Cut(1.0, top_k=2))) == {0, 1}


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-7, 1e7, 1e39])
def test_no_temperature_makes_a_draw_impossible(temperature: float) -> None:
    drawn = set(draw_many([0.0, 1.0, -math.inf, 1.0], Cut(temperature)))
    assert drawn == ({1, 3} if temperature < 1 else {0, 1, 3})


def test_a_masked_token_is_never_drawn() -> None:
    assert set(draw_many([0.0, -math.inf, 0.0], Cut(1.0))) == {0, 2}


def by_definition(logits: Sequence[float], cut: Cut, u: float) -> tuple[list[int], int]:
    """The kept tokens and the drawn one, token by token; exact probabilities instead of weights."""
    probability = [math.exp((x - max(logits)) / cut.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: cut.top_k or None]
    goal = cut.top_p * math.fsum(probability[i] for i in order)
    kept, reached = [], 0.0
    for token in order:
        if reached < goal and probability[token] >= cut.min_p:
            kept.append(token)
        reached += probability[token]
    kept.sort()
    rest = u * math.fsum(probability[i] for i in kept)
    for token in kept:
        rest -= probability[token]
        if rest < 0:
            break
    return kept, token


# Halves of the probability before: all masses are exact, and so are ties.
HALVES = st.lists(st.integers(0, 6), min_size=1, max_size=40)
CUTS = st.builds(
    Cut,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 12),
    # The prime is more than any sum of masses, in units of the least: none is at an edge.
    top_p=st.sampled_from([26 / 2579, 774 / 2579, 1934 / 2579, 2502 / 2579, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


@given(HALVES, CUTS, st.integers(-(2**70), 2**70), st.integers(0, 2**31))
def test_a_draw_is_the_definition(halves: list[int], cut: Cut, seed: int, position: int) -> None:
    logits = [-cut.temperature * math.log(2) * half for half in halves]
    drawn = sample(torch.tensor([logits]), [cut], [seed], [position])[0]
    assert drawn == by_definition(logits, cut, uniform(seed, position))[1]


@given(HALVES, CUTS)
def test_what_is_drawn_is_what_is_kept(halves: list[int], cut: Cut) -> None:
    logits = [-cut.temperature * math.log(2) * half for half in halves]
    kept = by_definition(logits, cut, 0.0)[0]
    least = min(2.0 ** -halves[i] for i in kept) / sum(2.0 ** -halves[i] for i in kept)
    draws = min(MOST_DRAWS, round(12 / least))
    rows = torch.tensor([logits]).expand(draws, -1)
    drawn = set(sample(rows, [cut] * draws, [3] * draws, range(draws)))
    assert drawn <= set(kept)
    if draws < MOST_DRAWS:  # so many that each came up
        assert len(drawn) >= len(kept) * 0.9


LEVELS = st.sampled_from([-math.inf, -80.0, -26.0, -3.5, -1.0, -0.0, 0.0, 1.0, 1.0000001, 40.0])


@settings(max_examples=examples(100))
@given(
    st.lists(st.one_of(LEVELS, st.floats(-30, 30, width=32)), min_size=1, max_size=60),
    st.sampled_from([0.01, 0.7, 1.0, 3.0]),
    st.integers(0, 70),
    st.floats(0.0, 1.0, exclude_min=True),
    st.floats(0.0, 1.0),
    st.integers(0, 2**40),
)
def test_every_implementation_draws_the_same_token(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    if max(logits) == -math.inf:
        return
    rows = torch.tensor([logits]).expand(3, -1)
    cuts = [Cut(temperature, top_k), Cut(temperature, top_k, top_p, min_p), Cut(temperature)]
    arguments = rows, cuts, [seed] * 3, [0, 1, 2]
    with using("reference"):
        wanted = sample(*arguments)
    assert sample(*arguments) == wanted


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(1, 700),
    st.sampled_from([0.0, 0.1, 1.0, 9.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.integers(0, 2**31),
    CUTS,
)
def test_rows_of_any_length_are_drawn_alike(
    size: int, spread: float, step: float, seed: int, cut: Cut
) -> None:
    """Many tokens as far as each other, lengths that no vector divides, and forbidden ones."""
    noise = np.random.default_rng(seed)
    logits = noise.standard_normal((3, size)).astype(np.float32) * np.float32(spread)
    if step:
        logits = np.round(logits / step) * np.float32(step)
    logits[noise.random((3, size)) < 0.2] = -np.inf
    logits[:, noise.integers(size)] = 0.0
    arguments = torch.from_numpy(logits.astype(np.float32)), [cut] * 3, [seed] * 3, [0, 1, 2]
    with using("reference"):
        wanted = sample(*arguments)
    assert sample(*arguments) == wanted


def test_rows_shared_by_threads_are_drawn_as_alone(two_threads: None) -> None:
    logits = torch.randn(5, 1 << 16, generator=torch.Generator().manual_seed(4)) * 3
    cuts = [Cut(1.0), Cut(0.8, 50, 0.9), Cut(), Cut(1.0, 0, 0.5), Cut(1.0, 3000, 1.0, 0.001)]
    together = sample(logits, cuts, range(5), range(5))
    alone = [sample(logits[[i]], [cuts[i]], [i], [i])[0] for i in range(5)]
    assert together == alone


def test_weights_are_the_exponential_to_seven_digits() -> None:
    x = -np.linspace(0, 80, 10_001, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(sampling.exponential(x) / exact - 1).max() < 2e-7
    assert sampling.exponential(row(0.0, -0.0)).tolist() == [1, 1]
    assert sampling.exponential(row(-28.0)) * ONE < 1


def row(*values: float) -> npt.NDArray[np.float32]:
    return np.asarray(values, dtype=np.float32)


def penalised(
    logits: Sequence[float],
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    frequency: float = 0.0,
    presence: float = 0.0,
    repetition: float = 1.0,
) -> list[float]:
    told = sampling.penalise(
        row(*logits),
        prompt,
        output,
        frequency=frequency,
        presence=presence,
        repetition=repetition,
    )
    return [float(value) for value in told]


def test_penalties_by_hand() -> None:
    assert penalised([1, 2, 3, 4], output=[1, 1, 3], frequency=0.5) == [1, 1, 3, 3.5]
    assert penalised([1, 2, 3, 4], output=[1, 1, 3], presence=0.5) == [1, 1.5, 3, 3.5]
    assert penalised([1, 2, 3, 4], prompt=[0], output=[], frequency=2, presence=2) == [1, 2, 3, 4]
    assert penalised([4, -4, 3, 0], prompt=[0, 0, 3], output=[1], repetition=2) == [2, -8, 3, 0]


LOGITS = st.lists(st.floats(-50, 50, width=32), min_size=8, max_size=8)
TOKENS = st.lists(st.integers(0, 7), max_size=20)
PENALTY = st.floats(-2, 2, width=32)


@given(LOGITS, TOKENS, TOKENS, PENALTY, PENALTY, st.floats(0.5, 2, width=32))
def test_penalties_are_the_formula_token_by_token(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    frequency: float,
    presence: float,
    repetition: float,
) -> None:
    told = penalised(logits, prompt, output, frequency, presence, repetition)
    for token, logit in enumerate(logits):
        wanted = logit
        if token in prompt or token in output:
            wanted = logit / repetition if logit > 0 else logit * repetition
        wanted -= frequency * output.count(token) + presence * (token in output)
        assert told[token] == pytest.approx(wanted, abs=1e-4)


def test_penalties_and_biases_leave_the_row_itself_alone() -> None:
    logits = row(1, 2, 3)
    penalised_row = sampling.penalise(logits, [0], [1], frequency=1, presence=1, repetition=2)
    biased = sampling.bias(logits, {0: 5, 2: -100})
    limited = sampling.restrict(logits, np.asarray([True, False, True]))
    assert logits.tolist() == [1, 2, 3]
    assert penalised_row.tolist() == [0.5, -1, 3]
    assert biased.tolist() == [6, 2, -math.inf]
    assert limited.tolist() == [1, -math.inf, 3]
    assert {array.dtype for array in (penalised_row, biased, limited)} == {np.dtype(np.float32)}


@given(LOGITS, st.sets(st.integers(0, 7), max_size=7))
def test_log_probabilities_sum_to_one_and_impossible_ones_are_minus_infinity(
    logits: list[float], forbidden: set[int]
) -> None:
    values = row(*logits)
    values[list(forbidden)] = -np.inf
    logprobs = sampling.log_probabilities(values)
    assert np.exp(logprobs).sum() == pytest.approx(1)
    assert {i for i, value in enumerate(logprobs) if value == -math.inf} >= forbidden


@given(st.lists(st.sampled_from([-math.inf, -2.0, -1.0, -0.5]), min_size=1), st.integers(0, 30))
def test_the_most_probable_are_sorted_with_the_lowest_id_on_ties(
    logprobs: list[float], count: int
) -> None:
    ids = sampling.most_probable(np.asarray(logprobs), count)
    assert ids == sorted(range(len(logprobs)), key=lambda i: (-logprobs[i], i))[:count]
