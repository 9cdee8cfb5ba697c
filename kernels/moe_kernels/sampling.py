"""Choose the next token of every sequence from its logits, and say how probable tokens were.

A choice is a pure function of the row's logits, its parameters and the token's position: it does
not depend on the batch, a restart or an earlier draw. One uniform number per token, hashed from
(seed, position), picks from the sorted probabilities.

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
BAN = -100.0
"""A bias of this or less forbids its token, as OpenAI's documentation promises."""

Row = npt.NDArray[np.float32]


class NonFiniteLogits(ValueError):
    """A row of logits has no finite maximum; choosing a token from it would hide a fault."""


@dataclass(frozen=True)
class Cut:
    """Which of the tempered probabilities may be drawn; the defaults keep all of them."""

    temperature: float = 0.0
    """0 = the most probable token, nothing is drawn."""
    top_k: int = 0
    """0 = all."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Least probability, as a share of the largest one."""


def sample(
    logits_BV: Tensor, cuts_B: Sequence[Cut], seeds_B: Sequence[int], positions_B: Sequence[int]
) -> Tensor:
    """Token ids int64 [B] on the CPU of float32 logits.

    Temperature 0 takes the largest logit, the lowest id on ties. Otherwise one of the `top_k` most
    probable tokens is drawn by probability; among these, of the smallest set whose mass reaches
    `top_p`, and only such with `min_p` times the probability of the first.
    Raises NonFiniteLogits for NaN, +inf, or a row of -inf alone.
    """
    logits = as_rows(logits_BV)
    unusable = unusable_rows(logits)
    if unusable:
        raise NonFiniteLogits(f"logits of rows {unusable} are not finite")
    tokens = logits.argmax(axis=1).astype(np.int64)
    for row, cut in enumerate(cuts_B):
        if cut.temperature > 0.0:
            tokens[row] = _draw(logits[row], cut, uniform(seeds_B[row], positions_B[row]))
    return torch.from_numpy(tokens)


def as_rows(logits_BV: Tensor) -> Row:
    """The logits as float32 on the CPU; shares their memory where they are that already."""
    rows: Row = logits_BV.detach().to("cpu", torch.float32).numpy()
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


def _draw(logits_V: Row, cut: Cut, u: float) -> int:
    scaled = (logits_V.astype(np.float64) - float(logits_V.max())) / cut.temperature
    order = np.argsort(-scaled, kind="stable")[: cut.top_k or None]
    weights = np.exp(scaled[order])
    mass = np.cumsum(weights)
    # Strictly less: a token belongs to the nucleus if the mass before it has not reached top_p.
    kept = int(np.searchsorted(mass, cut.top_p * mass[-1], side="left")) + 1
    if cut.min_p > 0.0:
        kept = min(kept, int(np.searchsorted(-weights, -cut.min_p * weights[0], side="right")))
    kept = min(kept, len(mass))
    place = min(int(np.searchsorted(mass[:kept], u * mass[kept - 1], "right")), kept - 1)
    return int(order[place])
