"""Choose the next token of every sequence from its logits.

A choice is a pure function of the row's logits, its parameters and the token's position: it does
not depend on the batch, a restart or an earlier draw. One uniform number per token, hashed from
(seed, position), picks from the sorted probabilities.

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MASK = (1 << 64) - 1


class NonFiniteLogits(ValueError):
    """A row of logits has no finite maximum; choosing a token from it would hide a fault."""


def sample(
    logits_BV: Tensor,
    temperature_B: list[float],
    top_p_B: list[float],
    seeds_B: list[int],
    positions_B: list[int],
) -> Tensor:
    """Token ids int64 [B] on the CPU of float32 logits.

    Temperature 0 takes the largest logit, the lowest id on ties. Otherwise the smallest set of
    most probable tokens whose mass reaches top_p is drawn from, by probability.
    Raises NonFiniteLogits for NaN or +inf.
    """
    logits = logits_BV.to("cpu", torch.float32).numpy()
    largest = logits.max(axis=1)
    if not np.isfinite(largest).all():
        rows = np.flatnonzero(~np.isfinite(largest)).tolist()
        raise NonFiniteLogits(f"logits of rows {rows} are not finite")
    tokens = logits.argmax(axis=1)
    for row, temperature in enumerate(temperature_B):
        if temperature > 0.0:
            u = uniform(seeds_B[row], positions_B[row])
            tokens[row] = _draw(logits[row], temperature, top_p_B[row], u)
    return torch.from_numpy(tokens.astype(np.int64))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, from splitmix64's output function applied twice."""
    return (_mix(_mix(seed & _MASK) + position) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _draw(logits_V: npt.NDArray[np.float32], temperature: float, top_p: float, u: float) -> int:
    scaled = (logits_V.astype(np.float64) - float(logits_V.max())) / temperature
    order = np.argsort(-scaled, kind="stable")
    mass = np.cumsum(np.exp(scaled[order]))
    # Strictly less: a token belongs to the nucleus if the mass before it has not reached top_p.
    kept = int(np.searchsorted(mass, top_p * mass[-1], side="left")) + 1
    kept = min(kept, len(mass))
    return int(order[min(int(np.searchsorted(mass[:kept], u * mass[kept - 1], "right")), kept - 1)])
