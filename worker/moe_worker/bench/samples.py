"""Many measured values in bounded memory, and their percentiles."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

MAX_KEPT = 200_000
"""All values up to this many; of more, a uniform sample: then p99 is a percentile between
98.93 and 99.07 (three standard errors)."""


@dataclass(frozen=True)
class Distribution:
    """Of `count` values; percentiles interpolate linearly between neighbours."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Samples:
    def __init__(self, random_source: random.Random, max_kept: int = MAX_KEPT) -> None:
        self._random = random_source
        self._max_kept = max_kept
        self._kept = array("d")
        self._count = 0
        self._sum = 0.0
        self._max = float("-inf")

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            self._count += 1
            self._sum += value
            self._max = max(self._max, value)
            if self._count <= self._max_kept:
                self._kept.append(value)
                continue
            # Algorithm R (Vitter 1985): every value so far is kept with the same probability.
            place = self._random.randrange(self._count)
            if place < self._max_kept:
                self._kept[place] = value

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def distribution(self) -> Distribution | None:
        """None when there are no values."""
        if not self._count:
            return None
        p50, p90, p99 = np.percentile(np.frombuffer(self._kept), [50, 90, 99]).tolist()
        return Distribution(self._count, self._sum / self._count, p50, p90, p99, self._max)
