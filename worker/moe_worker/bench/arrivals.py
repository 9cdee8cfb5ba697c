"""When requests are sent: at random whatever the server does, or as soon as others are answered.

Pure: `drive` waits for the times that are drawn here.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class OpenLoop:
    """Users who do not know of each other: arrivals are a Poisson process."""

    rate_per_second: float
    connections: int
    """Requests that may be under way at once; the rest waits, and its wait counts as latency."""

    @property
    def most_at_once(self) -> int:
        return self.connections


@dataclass(frozen=True)
class ClosedLoop:
    """So many users, each of whom sends the next request when the last one is answered."""

    concurrency: int

    @property
    def most_at_once(self) -> int:
        return self.concurrency


Traffic = OpenLoop | ClosedLoop


def arrivals(
    traffic: Traffic, num_requests: int, duration_seconds: float, random_source: random.Random
) -> Iterator[float | None]:
    """Seconds after the start at which each request arrives; None = when somebody is free.

    At most `num_requests`, none at or after `duration_seconds`. For a closed loop the end of the
    duration is up to the caller, who knows the time.
    """
    match traffic:
        case OpenLoop(rate_per_second):
            offsets = itertools.takewhile(
                lambda offset: offset < duration_seconds, poisson(rate_per_second, random_source)
            )
            return itertools.islice(offsets, num_requests)
        case ClosedLoop():
            return itertools.repeat(None, num_requests)


def poisson(rate_per_second: float, random_source: random.Random) -> Iterator[float]:
    """Times of a Poisson process, in seconds from 0: gaps are exponential with mean 1 / rate."""
    offset = 0.0
    while True:
        offset += random_source.expovariate(rate_per_second)
        yield offset
