"""The figures of a run, drawn from a measurement: what the table shows and the JSON file holds.

Pure. Neighbours: `measurement` has the sums, `table` shows a report to people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from moe_worker.bench.measurement import Measurement
from moe_worker.bench.objective import Objective
from moe_worker.bench.record import Outcome
from moe_worker.bench.samples import Distribution

SCHEMA = 1
LEAST_SECONDS = 1e-6
"""No rate is told of a shorter run."""


class Ending(StrEnum):
    ALL = "all requests ended"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Throughput:
    """Per second, of requests that were answered to the end. None = usage told no input tokens."""

    requests_per_second: float
    output_tokens_per_second: float
    input_tokens_per_second: float | None


@dataclass(frozen=True)
class TokenSums:
    input: int | None
    output: int
    cached: int | None
    """Of the input; None = usage did not tell."""
    answers_without_usage: int
    """Of these, pieces of text stand for output tokens."""


@dataclass(frozen=True)
class Goodput:
    """What met the objective."""

    requests: int
    share: float
    """Of all requests that ended, failed ones too."""
    requests_per_second: float


@dataclass(frozen=True)
class Report:
    setting: Mapping[str, Any]
    """How the run was asked for: JSON values."""
    ending: Ending
    seconds: float
    """From the start to the end of the last request, or to the interruption."""
    num_started: int
    outcomes: Mapping[Outcome, int]
    retries: int
    latencies: Mapping[str, Distribution | None]
    """In seconds; None = no values."""
    throughput: Throughput | None
    """None when hardly any time went by."""
    tokens: TokenSums
    goodput: Goodput | None
    """None when there is no objective, or hardly any time went by."""
    details: Mapping[str, int]

    @property
    def num_failed(self) -> int:
        return sum(count for outcome, count in self.outcomes.items() if outcome is not Outcome.OK)

    @property
    def num_unfinished(self) -> int:
        """Under way when the run was interrupted."""
        return self.num_started - sum(self.outcomes.values())

    def to_wire(self) -> dict[str, Any]:
        """As JSON values; every key is there in every report."""
        return {
            "schema": SCHEMA,
            "setting": dict(self.setting),
            "ending": self.ending.value,
            "seconds": self.seconds,
            "requests": {
                "started": self.num_started,
                "failed": self.num_failed,
                "unfinished": self.num_unfinished,
                "retries": self.retries,
                "outcomes": {outcome.value: self.outcomes.get(outcome, 0) for outcome in Outcome},
            },
            "latency_seconds": {
                name: None if found is None else asdict(found)
                for name, found in self.latencies.items()
            },
            "throughput": None if self.throughput is None else asdict(self.throughput),
            "tokens": asdict(self.tokens),
            "goodput": None if self.goodput is None else asdict(self.goodput),
            "failures": dict(self.details),
        }


def report(
    measurement: Measurement,
    objective: Objective,
    setting: Mapping[str, Any],
    interrupted_seconds: float | None,
) -> Report:
    """`interrupted_seconds`: when the run was interrupted, on the measurement's clock."""
    ended = measurement.ended_seconds if interrupted_seconds is None else interrupted_seconds
    seconds = ended - measurement.began_seconds
    has_rates = seconds >= LEAST_SECONDS
    num_ok = measurement.outcomes[Outcome.OK]
    return Report(
        setting=setting,
        ending=Ending.ALL if interrupted_seconds is None else Ending.INTERRUPTED,
        seconds=seconds,
        num_started=measurement.num_started,
        outcomes=dict(measurement.outcomes),
        retries=measurement.retries,
        latencies={name: found.distribution() for name, found in measurement.latencies.items()},
        throughput=_throughput(measurement, num_ok, seconds) if has_rates else None,
        tokens=TokenSums(
            input=measurement.input_tokens if measurement.num_told_input else None,
            output=measurement.output_tokens,
            cached=measurement.cached_tokens if measurement.num_told_cached else None,
            answers_without_usage=num_ok - measurement.num_told_output,
        ),
        goodput=_goodput(measurement, seconds) if objective and has_rates else None,
        details=dict(measurement.details),
    )


def _throughput(measurement: Measurement, num_ok: int, seconds: float) -> Throughput:
    told = measurement.num_told_input
    return Throughput(
        requests_per_second=num_ok / seconds,
        output_tokens_per_second=measurement.output_tokens / seconds,
        input_tokens_per_second=measurement.input_tokens / seconds if told else None,
    )


def _goodput(measurement: Measurement, seconds: float) -> Goodput:
    met = measurement.num_within_objective
    ended = measurement.num_ended
    return Goodput(met, met / ended if ended else 0.0, met / seconds)
