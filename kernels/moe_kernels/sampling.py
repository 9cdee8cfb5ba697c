"""Choose the next token of every sequence from its logits, and say how probable tokens were.

A choice is a pure function of the row's logits, its parameters and the token's position: it does
not depend on the batch, a restart or an earlier draw. One uniform number per token, hashed from
(seed, position), picks from the probabilities of the kept tokens in order of id, so that nothing
need be sorted. Probabilities are whole numbers: their sums are exact in any order, and every
implementation draws the same token.

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_kernels.implementation import implemented

_MASK = (1 << 64) - 1
BAN = -100.0
"""A bias of this or less forbids its token, as OpenAI's documentation promises."""
ONE = 1 << 40
"""The weight of the most probable token; at most 2²³ of them fit a sum of int64."""
_LIMITS = np.finfo(np.float32)

Row = npt.NDArray[np.float32]


class NonFiniteLogits(ValueError):
    """Rows of logits have no finite maximum; choosing a token from them would hide a fault."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"logits of rows {list(rows)} are not finite")
        self.rows = tuple(rows)


class Cut(NamedTuple):
    """Which of the tempered probabilities may be drawn; the defaults keep all of them."""

    temperature: float = 0.0
    """0 = the most probable token, nothing is drawn."""
    top_k: int = 0
    """0 = all."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Least probability, as a share of the largest one."""


@implemented
def sample(
    logits_BV: Tensor, cuts_B: Sequence[Cut], seeds_B: Sequence[int], positions_B: Sequence[int]
) -> list[int]:
    """A token id for each row of float32 logits.

    Temperature 0 takes the largest logit, the lowest id on ties. Otherwise, with t the factor
    that `steepness` gives of the temperature, a token has
      the distance d = (largest logit - its logit) * t, two roundings to float32, and
      the weight w = floor(ONE * e^-d), e^ by `exponential`.
    Of the tokens by distance, the lowest id first on ties, the first `top_k` are kept; of these,
    where top_p < 1, the fewest whose weights reach `share(top_p, their sum)`; and of these, all
    with w >= `share(min_p, ONE)`. With W the sum of the weights kept, the token drawn is the first
    in order of id at which the running sum exceeds `place(uniform(seed, position), W)`.
    Raises NonFiniteLogits for NaN, +inf, or a row of -inf alone.
    """
    from moe_kernels.reference import sampling as reference

    return reference.sample(logits_BV, cuts_B, seeds_B, positions_B)


def steepness(temperature: float) -> np.float32:
    """1 / temperature, kept where neither 0 nor infinity times it is no number."""
    return np.float32(min(max(1.0 / temperature, float(_LIMITS.tiny)), float(_LIMITS.max)))


def share(part: float, whole: int) -> int:
    """The least weight that is `part` of the whole, in float64: at least 0, at most `whole`."""
    return min(int(np.ceil(part * float(whole))), whole)


def place(u: float, whole: int) -> int:
    """The place of 0 <= u < 1 among `whole` of them, in float64: at most whole - 1."""
    return min(int(u * float(whole)), whole - 1)


def exponential(x_V: Row) -> Row:
    """e^x of float32 x <= 0 by additions and products that are rounded one by one, so that others
    can give the same bits: 2^n times a polynomial. Below -87 as at -87."""
    bounded = np.maximum(x_V, np.float32(-87))
    n = np.floor(bounded * np.float32(1.4426950408889634) + np.float32(0.5))
    # The first part of ln 2 has few bits: its product with n is exact.
    f = bounded - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    power = np.full_like(f, np.float32(1 / 5040))
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        power = np.float32(1 / divisor) + f * power
    scaled: Row = np.ldexp(power, n.astype(np.int32))
    return scaled


def as_rows(logits_BV: Tensor) -> Row:
    """The logits as float32 on the CPU; shares their memory where they are that already."""
    if logits_BV.dtype != torch.float32 or not logits_BV.is_cpu:
        logits_BV = logits_BV.to("cpu", torch.float32)
    rows: Row = logits_BV.detach().numpy()
    return rows


def stacked(rows: Sequence[Row]) -> Row:
    """Rows [V] as one array [B, V]."""
    return np.stack(rows)


def unusable_rows(logits_BV: Row) -> list[int]:
    """Rows that no token can be chosen from."""
    bad: list[int] = np.flatnonzero(~np.isfinite(logits_BV.max(axis=1))).tolist()
    return bad


def penalise(
    logits_V: Row,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    frequency: float,
    presence: float,
    repetition: float,
) -> Row:
    """A copy in which tokens that were there already are less (or more) likely.

    `repetition` divides positive logits of all tokens of prompt and output, and multiplies negative
    ones (Keskar et al. 2019); then, as OpenAI documents it, `frequency` times the number of
    occurrences in the output and once `presence` are taken off.
    """
    row = logits_V.copy()
    if repetition != 1.0:
        seen = np.unique(np.asarray([*prompt, *output], dtype=np.int64))
        factor = np.float32(repetition)
        row[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
    if output and (frequency or presence):
        ids, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
        row[ids] -= np.float32(frequency) * counts.astype(np.float32) + np.float32(presence)
    return row


def bias(logits_V: Row, bias_by_token: Mapping[int, float]) -> Row:
    """A copy with the biases added; BAN and less forbid a token."""
    row = logits_V.copy()
    ids = np.fromiter(bias_by_token.keys(), dtype=np.int64)
    values = np.fromiter(bias_by_token.values(), dtype=np.float32)
    row[ids] += np.where(values <= BAN, np.float32(-np.inf), values)
    return row


def restrict(logits_V: Row, allowed_V: npt.NDArray[np.bool_]) -> Row:
    """A copy in which only allowed tokens are possible."""
    return np.where(allowed_V, logits_V, np.float32(-np.inf)).astype(np.float32, copy=False)


def log_probabilities(logits_V: Row) -> npt.NDArray[np.float64]:
    """Natural logarithms, -inf for what is impossible; one token of the row is possible."""
    shifted = logits_V.astype(np.float64) - float(logits_V.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def most_probable(logprobs_V: npt.NDArray[np.float64], count: int) -> list[int]:
    """The ids of the `count` largest (at most V), largest first, the lowest id on ties."""
    count = min(count, len(logprobs_V))
    if not count:
        return []
    threshold = np.partition(logprobs_V, len(logprobs_V) - count)[len(logprobs_V) - count]
    candidates = np.flatnonzero(logprobs_V >= threshold)
    order = np.argsort(-logprobs_V[candidates], kind="stable")
    ids: list[int] = candidates[order[:count]].tolist()
    return ids


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, from splitmix64's output function applied twice."""
    return (_mix(_mix(seed & _MASK) + position) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
