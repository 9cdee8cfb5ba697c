"""All records of a run added up as they come, in memory that does not grow with their number.

Neighbours: `drive` adds, `progress` shows, `report` draws the conclusions.
"""

from __future__ import annotations

import random
from collections import Counter

from moe_worker.bench.objective import Objective
from moe_worker.bench.record import Outcome, Record
from moe_worker.bench.samples import Samples

MAX_DETAILS = 10
LATENCIES = ("ttft", "itl", "per_token", "end_to_end", "waited")


class Measurement:
    """Latencies are those of requests that were answered to the end."""

    def __init__(self, began_seconds: float, objective: Objective, seed: int) -> None:
        self.began_seconds = began_seconds
        self.ended_seconds = began_seconds
        """End of the last request."""
        self.num_started = 0
        self.outcomes: Counter[Outcome] = Counter()
        self.retries = 0
        self.input_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.num_told_input = 0
        self.num_told_output = 0
        self.num_told_cached = 0
        """Answers whose usage told these tokens."""
        self.num_within_objective = 0
        self.details: Counter[str] = Counter()
        """What went wrong how often: the first MAX_DETAILS texts."""
        self.latencies = {
            name: Samples(random.Random(f"{seed}/{name}")) for name in LATENCIES
        }  # fmt: skip
        self._objective = objective

    @property
    def num_ended(self) -> int:
        return self.outcomes.total()

    @property
    def num_failed(self) -> int:
        return self.num_ended - self.outcomes[Outcome.OK]

    def start(self) -> None:
        """One more is under way."""
        self.num_started += 1

    def add(self, record: Record) -> None:
        """A request that was started has ended."""
        self.ended_seconds = max(self.ended_seconds, record.end_seconds)
        self.outcomes[record.outcome] += 1
        self.retries += record.retries
        self.num_within_objective += self._objective.met_by(record)
        if record.is_ok:
            self._add_tokens(record)
            self._add_latencies(record)
            return
        text = f"{record.outcome}: {record.detail}"
        if text in self.details or len(self.details) < MAX_DETAILS:
            self.details[text] += 1

    def _add_tokens(self, record: Record) -> None:
        self.input_tokens += record.tokens.input or 0
        self.output_tokens += record.output_tokens
        self.cached_tokens += record.tokens.cached or 0
        self.num_told_input += record.tokens.input is not None
        self.num_told_output += record.tokens.output is not None
        self.num_told_cached += record.tokens.cached is not None

    def _add_latencies(self, record: Record) -> None:
        for name, value in (
            ("ttft", record.first_text_seconds),
            ("per_token", record.per_token_seconds),
            ("end_to_end", record.whole_seconds),
            ("waited", record.waited_seconds),
        ):
            if value is not None:
                self.latencies[name].add((value,))
        self.latencies["itl"].add(record.gaps_seconds)
